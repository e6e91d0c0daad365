"""Each kind of image file becomes the pixels that a viewer shows, or one line says why not."""

import contextlib
import gzip
import io
import itertools
import json
import logging
import re
import struct
import sys
import zlib

import nibabel
import numpy as np
import pillow_heif
import pydicom
import pytest
from PIL import Image
from pydicom import uid

from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.data.sources import parquet
from bam.extras import MissingExtraError
from bam.images import importing, listing, pixels
from tests.cases import at_most, refused, run_command
from tests.image_files import dicom

GREY = Preprocessing((4, 6), 1)
COLOUR = Preprocessing((4, 6), 3)
# Left half 200, right half 40: upright 4 × 6, so that every turn and mirror shows.
LEVELS = np.full((4, 6), 40, np.uint8)
LEVELS[:, :3] = 200
LEVELS[:1] = 120


def decoded(file, preprocessing=GREY):
    image = Image.open(io.BytesIO(pixels.encode(file, preprocessing).png))
    assert not image.info and not image.getexif() and image.mode in ("L", "RGB")
    return np.asarray(image)


# EXIF's orientation -> how the upright picture is stored.
STORED = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x, -1),
}
MODES = ("L", "LA", "P", "RGB", "RGBA")
TURNED = [
    *[("jpg", mode, turn) for mode in ("L", "RGB", "CMYK") for turn in STORED],
    *[("png", mode, turn) for mode in (*MODES, "1", "I;16") for turn in (3, 6)],
    *[("webp", mode, turn) for mode in ("RGB", "RGBA") for turn in (6, 7)],
    *[("tif", mode, turn) for mode in (*MODES, "CMYK", "I;16", "F") for turn in (5, 6)],
    *[("lzw.tif", mode, turn) for mode in ("L", "RGBA", "I;16") for turn in (6, 8)],
    *[("avif", mode, turn) for mode in ("RGB", "RGBA") for turn in (6, 7)],
    *[("heic", mode, turn) for mode in ("RGB", "RGBA") for turn in (6,)],
]  # fmt: skip


def in_mode(levels, mode):
    if mode == "I;16":
        return Image.fromarray(levels.astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(levels.astype(np.float32))
    image = Image.fromarray(np.ascontiguousarray(levels))
    return image.convert("RGB").convert(mode) if mode == "CMYK" else image.convert(mode)


@pytest.mark.parametrize(("kind", "mode", "turn"), TURNED)
def test_every_mode_and_format_is_upright(tmp_path, kind, mode, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    file = tmp_path / f"x.{kind}"
    levels = 255 * (LEVELS > 150).astype(np.uint8) if mode == "1" else LEVELS
    # As blocks of 8, because JPEG and its like blur what is finer.
    big = np.kron(STORED[turn](levels), np.ones((8, 8), np.uint8))
    options = {"quality": 100} if kind in ("jpg", "webp", "avif", "heic") else {}
    options |= {"compression": "tiff_lzw"} if kind == "lzw.tif" else {}
    if kind == "heic":
        pillow_heif.register_heif_opener()
    in_mode(big, mode).save(file, exif=exif.tobytes() if kind == "heic" else exif, **options)
    shown = decoded(file, GREY._replace(size=(32, 48), window=(0, 255) if mode == "F" else None))
    assert np.abs(shown[4::8, 4::8].astype(int) - levels).max() <= 6


def png(color_type, depth, width, rows, **chunks):
    """A PNG file by its parts, because Pillow writes few kinds of it."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, len(rows), depth, color_type, 0, 0, 0)}
    parts |= {name.encode(): value for name, value in chunks.items()}
    parts |= {b"IDAT": zlib.compress(b"".join(b"\0" + row for row in rows)), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x))
        for name, x in parts.items()
    )


def be(*numbers):
    return struct.pack(f">{len(numbers)}H", *numbers)


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def flat(value, mode="L", size=(6, 4), **info):
    image = Image.new(mode, size, value)
    image.info.update(info)
    return image


def half(image):
    image.putalpha(102)
    return image


def premultiplied(tiff):
    tag = struct.pack("<HHIH", 338, 3, 1, 2)  # ExtraSamples: opacity by itself
    assert tag in tiff
    return tiff.replace(tag, struct.pack("<HHIH", 338, 3, 1, 1))


def palette(*colours):
    image = Image.new("P", (6, 4), 1)
    image.putpalette([x for colour in colours for x in colour])
    return image


def tiff(photometric, channels, content, extra=None, signed=False, order="<"):
    """A TIFF of 6 × 4 by its parts, of kinds that Pillow does not write."""
    bits = len(content) * 8 // (24 * channels)
    tags = {256: 6, 257: 4, 258: bits, 259: 1, 262: photometric, 273: 0, 277: channels, 278: 4}
    tags |= {279: len(content), 338: extra, 339: 2 if signed else None}
    tags = {tag: x for tag, x in sorted(tags.items()) if x is not None}
    end = 14 + 12 * len(tags)
    tags[273] = end + 2 * channels  # behind the bits of the channels, which are behind the tags
    many = {258: struct.pack(order + "HHII", 258, 3, channels, end)} if channels > 1 else {}
    parts = [many.get(x, struct.pack(order + "HHIHH", x, 3, 1, tags[x], 0)) for x in tags]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    behind = bytes(4) + struct.pack(f"{order}{channels}H", *[bits] * channels)
    return head + b"".join(parts) + behind + content


def array(numbers):
    file = io.BytesIO()
    np.save(file, numbers)
    return file.getvalue()


def full(value, kind=np.uint16, shape=(4, 6)):
    return np.full(shape, value, kind)


def lut(first, *entries):
    item = pydicom.Dataset()
    item.LUTDescriptor = [len(entries), first, 16]
    item.add_new("LUTData", "US", list(entries))
    return pydicom.Sequence([item])


def nifti(numbers, slope=None):
    volume = nibabel.Nifti1Image(numbers, np.eye(4))
    volume.header.set_slope_inter(slope, 0 if slope else None)
    return volume.to_bytes()


def heic(image, **options):
    pillow_heif.register_heif_opener()
    return saved(image, "HEIF", quality=100, **options)


CT = {"RescaleSlope": 2, "RescaleIntercept": -1000}
SLICES = np.stack([full(x, np.int16) for x in (0, 0, 80, 0, 0)], -1)
VOI = {"WindowCenter": 201, "WindowWidth": 401}
FALLING = {"RescaleSlope": -1, "RescaleIntercept": 0, "WindowCenter": -50, "WindowWidth": 40}
WINDOW = {"window": (-100.0, 300.0)}
TWO = {"save_all": True, "append_images": [flat(9)]}
# Kind -> file's suffix, bytes, what differs from GREY, the value of all pixels.
KINDS = {
    "RGBA on white": ("png", saved(flat((0, 0, 0, 102), "RGBA")), {}, 153),
    "RGBA on black": (
        "png", saved(flat((250, 250, 250, 102), "RGBA")), {"background": "black"}, 100),
    "LA": ("png", saved(flat((0, 102), "LA")), {}, 153),
    "LA of TIFF": ("tif", saved(flat((0, 102), "LA"), "TIFF"), {}, 153),
    "La of TIFF": ("tif", premultiplied(saved(flat((0, 102), "LA"), "TIFF")), {}, 153),
    "RGBA of WebP": ("webp", saved(flat((0, 0, 0, 102), "RGBA"), "WEBP", lossless=True), {}, 153),
    "RGBA of BMP": ("bmp", saved(flat((0, 0, 0, 255), "RGBA"), "BMP"), {}, 0),
    "palette": ("png", saved(palette((9, 9, 9), (70, 70, 70))), {}, 70),
    "palette, one index clear": (
        "png", saved(palette((9,) * 3, (70,) * 3), transparency=1), {}, 255),
    "palette, bytes of opacity": (
        "png", saved(palette((9,) * 3, (0,) * 3), transparency=b"\xff\x66"), {}, 153),
    "palette of GIF, clear": (
        "gif", saved(palette((9,) * 3, (70,) * 3), "GIF", transparency=1), {}, 255),
    "palette of TIFF": ("tif", saved(palette((9,) * 3, (70,) * 3), "TIFF"), {}, 70),
    "PA": ("tif", saved(half(palette((9,) * 3, (0,) * 3).convert("PA")), "TIFF"), {}, 153),
    "grey with a clear level": ("png", png(0, 8, 6, [b"\x46" * 6] * 4, tRNS=be(70)), {}, 255),
    "grey with another clear level": ("png", png(0, 8, 6, [b"\x46" * 6] * 4, tRNS=be(71)), {}, 70),
    "grey of 2 bits": ("png", png(0, 2, 8, [b"\xaa" * 2] * 4), {}, 170),
    "grey of 2 bits, clear": ("png", png(0, 2, 8, [b"\xaa" * 2] * 4, tRNS=be(2)), {}, 255),
    "grey of 4 bits, clear": ("png", png(0, 4, 6, [b"\x33" * 3] * 4, tRNS=be(3)), {}, 255),
    "1 bit": ("png", saved(flat(1, "1")), {}, 255),
    "1 bit, clear": ("png", png(0, 1, 8, [b"\0"] * 4, tRNS=be(0)), {}, 255),
    "1 bit of TIFF by fax": ("tif", saved(flat(0, "1"), "TIFF", compression="group4"), {}, 0),
    "RGB with a clear colour": (
        "png", png(2, 8, 6, [bytes((1, 2, 3)) * 6] * 4, tRNS=be(1, 2, 3)), {}, 255),
    "CMYK of JPEG": ("jpg", saved(flat((0, 0, 0, 55), "CMYK"), "JPEG", quality=100), {}, 200),
    "CMYK of TIFF": ("tif", saved(flat((0, 0, 0, 55), "CMYK"), "TIFF"), {}, 200),
    "YCbCr": ("jpg", saved(flat((90, 128, 128), "YCbCr"), "JPEG", quality=100), {}, 90),
    "YCbCr of TIFF": ("tif", saved(flat((90,) * 3, "RGB"), "TIFF", compression="jpeg"), {}, 90),
    "LAB": ("tif", saved(flat((137, 128, 128), "LAB"), "TIFF"), {}, 128),
    "GIF": ("gif", saved(flat(77), "GIF"), {}, 77),
    "GIF, first of two": ("gif", saved(flat(77), "GIF", **TWO), {}, 77),
    "APNG": ("png", saved(flat(77), **TWO), {}, 77),
    "WebP, first of two": (
        "webp", saved(flat(77), "WEBP", lossless=True, **TWO), {}, 77),
    "TIFF of two pages": ("tif", saved(flat(77), "TIFF", **TWO), {}, 77),
    "JPEG 2000": ("jp2", saved(flat(77), "JPEG2000"), {}, 77),
    "AVIF": ("avif", saved(flat((77,) * 3, "RGB"), "AVIF", quality=100), {}, 77),
    "HEIC": ("heic", heic(flat((77,) * 3, "RGB", (64, 64))), {}, 77),
    "HEIC named JPEG": ("jpg", heic(flat((77,) * 3, "RGB", (64, 64))), {}, 77),
    "16 bits": ("png", saved(Image.fromarray(full(0x8FFF))), {}, 0x8F),
    "16 bits of TIFF": ("tif", saved(Image.fromarray(full(0x8FFF)), "TIFF"), {}, 0x8F),
    "16 bits, other order": (
        "tif", saved(Image.frombytes("I;16B", (6, 4), b"\x8f\xff" * 24), "TIFF"), {}, 0x8F),
    "16 bits, clear": ("png", png(0, 16, 6, [be(300) * 6] * 4, tRNS=be(300)), {}, 255),
    "16 bits, window": ("png", saved(Image.fromarray(full(100))), WINDOW, 128),
    "16 bits with opacity": ("png", png(4, 16, 6, [be(100, 0xFFFF) * 6] * 4), WINDOW, 128),
    "16 bits with half opacity": ("png", png(4, 16, 6, [be(0, 0x6666) * 6] * 4), {}, 153),
    "colour of 16 bits": ("png", png(2, 16, 6, [be(0x8FFF, 0x8FFF, 0x8FFF) * 6] * 4), {}, 0x8F),
    "colour of 16 bits, window": ("png", png(2, 16, 6, [be(100, 100, 100) * 6] * 4), WINDOW, 128),
    "colour of 16 bits, clear": (
        "png", png(2, 16, 6, [be(300, 300, 300) * 6] * 4, tRNS=be(300, 300, 300)), {}, 255),
    "RGBA of 16 bits, window": (
        "png", png(6, 16, 6, [be(100, 100, 100, 65535) * 6] * 4), WINDOW, 128),
    "RGBA of 16 bits, multiplied": (
        "tif", tiff(2, 4, be(50, 50, 50, 0x8000) * 24, 1, order=">"), WINDOW, 191),
    "int8 of TIFF": ("tif", tiff(1, 1, b"\x9c" * 24, signed=True), {"window": (-300, 300)}, 85),
    "int16 of TIFF, other order": (
        "tif", tiff(1, 1, b"\xff\x9c" * 24, signed=True, order=">"), {"window": (-300, 300)}, 85),
    "uint32 of TIFF": ("tif", tiff(1, 1, b"\xff\xff\xff\x8f" * 24), {}, 0x8F),
    "12 bits of TIFF": ("tif", tiff(1, 1, b"\x8f\xf8\xff" * 12), {}, 0x8F),
    "16 bits of TIFF, white is zero": ("tif", tiff(0, 1, b"\xff\x8f" * 24), {}, 112),
    "8 bits have no window": ("png", saved(flat(100)), WINDOW, 100),
    "int16 of TIFF": (
        "tif", saved(Image.fromarray(full(-100, np.int32)), "TIFF"), {"window": (-300, 300)}, 85),
    "float of TIFF": (
        "tif", saved(Image.fromarray(full(0.5, np.float32)), "TIFF"), {"window": (0, 1)}, 128),
    "float, none": (
        "tif", saved(Image.fromarray(full(np.nan, np.float32)), "TIFF"), {"window": (0, 1)}, 0),
    "array": ("npy", array(full(77, np.uint8)), {}, 77),
    "array of colour": ("npy", array(full(77, np.uint8, (4, 6, 3))), {}, 77),
    "array of one channel": ("npy", array(full(77, np.uint8, (4, 6, 1))), {}, 77),
    "array with opacity": ("npy", array(full(0, np.uint16, (4, 6, 4))), {}, 255),
    "array of bool": ("npy", array(full(True, bool)), {}, 255),
    "array of int64": ("npy", array(full(-100, ">i8")), {"window": (-300, 300)}, 85),
    "array of float64": ("npy", array(full(100.0, float)), WINDOW, 128),
    "array of uint32": ("npy", array(full(2**31, np.uint32)), {}, 128),
    "array with infinity": ("npy", array(full(np.inf, np.float16)), WINDOW, 255),
    "array read by columns": ("npy", array(np.asfortranarray(full(77, np.uint8))), {}, 77),
    "DICOM": ("dcm", dicom(full(77, np.uint8)), {}, 77),
    "DICOM without a suffix": ("IM0001", dicom(full(77, np.uint8)), {}, 77),
    "DICOM of 12 bits": ("dcm", dicom(full(0x8FF), BitsStored=12), {}, 0x8F),
    "DICOM, inverted": ("dcm", dicom(full(77, np.uint8), "MONOCHROME1"), {}, 178),
    "DICOM, its window": ("dcm", dicom(full(600), **VOI, **CT), {}, 128),
    "DICOM, several windows": (
        "dcm", dicom(full(600), WindowCenter=[201, 5], WindowWidth=[401, 9], **CT), {}, 128),
    "DICOM, below its window": ("dcm", dicom(full(9), **VOI, **CT), {}, 0),
    "DICOM, sigmoid": (
        "dcm", dicom(full(600), WindowCenter=200, WindowWidth=400, VOILUTFunction="SIGMOID",
            **CT), {}, 128),
    "DICOM, inverted in its window": (
        "dcm", dicom(full(9), "MONOCHROME1", **VOI, **CT), {}, 255),
    "DICOM, falling units": (
        "dcm", dicom(full(100), **FALLING), {}, 0),
    "DICOM, a window given": (
        "dcm", dicom(full(550), WindowCenter=9, WindowWidth=9, **CT), WINDOW, 128),
    "DICOM, signed": ("dcm", dicom(full(-100, np.int16)), {"window": (-300, 300)}, 85),
    "DICOM, a table of units": (
        "dcm", dicom(full(1), ModalityLUTSequence=lut(0, 0, 100)), WINDOW, 128),
    "DICOM, a table of grey": ("dcm", dicom(full(1), VOILUTSequence=lut(0, 0, 0x8FFF)), {}, 0x8F),
    "DICOM, a table of grey and units": (
        "dcm", dicom(full(501), VOILUTSequence=lut(0, 0, 0, 0x8FFF), **CT), {}, 0x8F),
    "DICOM, an empty window": (
        "dcm", dicom(full(77, np.uint8), WindowCenter=None, WindowWidth=None), {}, 77),
    "DICOM in colour": ("dcm", dicom(full(77, np.uint8, (4, 6, 3)), "RGB"), {}, 77),
    "DICOM in YBR": (
        "dcm", dicom(np.full((4, 6, 3), (77, 128, 128), np.uint8), "YBR_FULL"), {}, 77),
    "DICOM, big-endian": (
        "dcm", dicom(full(0x8FF, ">u2"), BitsStored=12, syntax=uid.ExplicitVRBigEndian), {}, 0x8F),
    "NIfTI": ("nii", nifti(SLICES), WINDOW, 115),
    "NIfTI, compressed": ("nii.gz", gzip.compress(nifti(SLICES)), WINDOW, 115),
    "NIfTI of two axes": ("nii", nifti(full(77, np.uint8)), {}, 77),
    "NIfTI with a slope": ("nii", nifti(full(40, np.uint8), 2.0), WINDOW, 115),
    "NIfTI of float": ("nii", nifti(full(100.0, np.float32, (4, 6, 3, 1))), WINDOW, 128),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_becomes_its_pixels(tmp_path, kind):
    suffix, content, change, expected = KINDS[kind]
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(content)
    for preprocessing in (GREY, COLOUR):
        shown = decoded(file, preprocessing._replace(**change))
        assert shown.shape[:2] == (4, 6)
        assert np.abs(shown.astype(int) - expected).max() <= (1 if kind != "AVIF" else 2)


def header_of(shape, kind="<u2"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def hollow(shape):
    volume = nibabel.Nifti1Image(full(0, np.uint8), np.eye(4))
    volume.header.set_data_shape(shape)
    return volume.header.binaryblock + bytes(4)


LARGE = np.broadcast_to(np.uint8(0), (20_000, 20_000))
# Kind -> suffix, bytes, the line.
REFUSED = {
    "a program": ("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify"),
    "a pointer": ("png", b"version https://git-lfs.github.com/spec/v1\noid x\n", "git lfs pull"),
    "a web page": ("jpg", b"<!DOCTYPE html><html>404</html>", "a web page, not an image"),
    "a header alone": ("dcm", bytes(128) + b"DICM" + bytes(40),
        r"the DICOM file has no image, or a damaged one \(no Photo"),
    "text called DICOM": ("dcm", b"no image" * 99,
        "not a DICOM file, or its first bytes are lost; copy it again"),
    "an empty file": ("png", b"", "cannot identify"),
    "objects": ("npy", array(np.array([{}])), "Python objects|Object arrays"),
    "text": ("npy", array(np.array([["a"]])), "is not an image"),
    "one axis": ("npy", array(np.zeros(5)), "is not an image"),
    "two channels": ("npy", array(np.zeros((4, 6, 2))), "is not an image"),
    "no pixels": ("npy", array(np.zeros((0, 6))), "0 × 6 pixels"),
    "complex": ("npy", array(np.zeros((4, 6), complex)), "is not an image"),
    "signed": ("npy", array(full(5, np.int16)), "is no window for signed"),
    "float": ("tif", saved(Image.fromarray(full(5, np.float32)), "TIFF"), "is no window for"),
    "a bomb of 1 bit": (
        "png", saved(Image.new("1", (12_000, 12_000))), "12000 × 12000 pixels; at most"),
    "a bomb of Pillow's": ("png", png(0, 8, 60_000, [b""] * 60_000), "exceeds limit"),
    "a bomb, array": ("npy", header_of((20_000, 20_000)) + bytes(9), "."),
    "a bomb, DICOM": ("dcm", dicom(full(0), Rows=20_000, Columns=20_000), "20000 × 20000 pixels"),
    "a bomb, NIfTI": ("nii", hollow((20_000, 20_000)), "20000 × 20000 pixels"),
    "a bomb, NIfTI's volume": ("nii", hollow((2000, 2000, 2000)), "at most 1,073,741,824 voxels"),
    "a deflated DICOM": (
        "dcm", dicom(full(5), syntax=uid.DeflatedExplicitVRLittleEndian), "a deflated DICOM file"),
    "DICOM of two frames": (
        "dcm", dicom(full(5), NumberOfFrames=2), "has 2 frames; only DICOM files with one"),
    "DICOM without pixels": ("dcm", dicom(full(5), Rows=9), "."),
    "no DICOM": ("dcm", b"nothing", "DICOM"),
    "NIfTI over time": ("nii", nifti(full(5, np.uint8, (4, 6, 2, 2))), r"shape \(4, 6, 2, 2\)"),
    "no NIfTI": ("nii.gz", b"nothing", "."),
    "no HEIC": ("heic", b"\0\0\0\x18ftypheic" + bytes(200), "."),
    "cut": ("tif", saved(flat(5, size=(99, 99)), "TIFF")[:-50], "."),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_image_is_one_line(tmp_path, kind):
    suffix, content, message = REFUSED[kind]
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(content)
    refused(message, pixels.encode, file, GREY, kind=DataError)


def extended(offset, size):
    """A NIfTI file of GREY's size whose header declares an extension, and zeros enough for it."""
    content = bytearray(nifti(full(7, np.uint8).T[..., None]).ljust(2**25, b"\0"))
    content[108:112] = struct.pack("<f", offset)
    content[348:360] = struct.pack("<4B2i", 1, 0, 0, 0, size, 6)
    return gzip.compress(bytes(content), 1)


def test_a_nifti_extension_is_not_read(tmp_path):
    file = tmp_path / "x.nii.gz"
    file.write_bytes(extended(offset=368, size=2**25 - 400))
    with at_most(8):
        pixels.encode(file, GREY)
    with pytest.raises(AssertionError, match="MiB"), at_most(8), contextlib.suppress(ValueError):
        nibabel.load(file)  # the control
    file.write_bytes(extended(offset=2**25, size=16))
    refused("33,554,432 bytes before its numbers", pixels.encode, file, GREY, kind=DataError)


VOLUME = np.random.default_rng(2).integers(0, 255, (4, 6, 8), np.uint8)  # right, front, top
CODES = [
    "".join(x)
    for order in itertools.permutations(("RL", "AP", "SI"))
    for x in itertools.product(*order)
]


def turned(code, image=None):
    """VOLUME as a scanner stores it whose axes lead where the letters say."""
    ornt = nibabel.orientations.axcodes2ornt(code)
    return (image or nibabel.Nifti1Image(VOLUME, np.eye(4))).as_reoriented(
        nibabel.orientations.ornt_transform([[0, 1], [1, 1], [2, 1]], ornt)
    )


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_a_volume_of_any_orientation_is_one_picture(tmp_path, suffix):
    file, as_stored = tmp_path / f"x.{suffix}", set()
    for code in CODES:
        image = turned(code)
        assert "".join(nibabel.aff2axcodes(image.affine)) == code
        nibabel.save(image, file)
        np.testing.assert_array_equal(decoded(file), VOLUME[:, :, 4])
        assert not pixels.encode(file, GREY).is_unoriented
        content = bytearray(image.to_bytes())
        content[252:256] = bytes(4)  # the control: without its affine it is as it is stored
        file.write_bytes(gzip.compress(content) if suffix == "nii.gz" else content)
        assert pixels.encode(file, GREY).is_unoriented
        as_stored.add(decoded(file).tobytes())
    assert len(CODES) == 48 and len(as_stored) > 40


def test_an_orientation_is_of_the_sform_then_of_the_qform_and_may_be_oblique(tmp_path):
    file, angle = tmp_path / "x.nii", np.deg2rad(20)
    turn = np.array(
        [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    )
    for sform, qform in ((1, 0), (0, 1), (1, 1)):
        image = turned("LPS")
        image.header.set_sform(image.affine if sform else np.eye(4), sform)
        image.header.set_qform(np.eye(4) if sform else image.affine, qform)
        file.write_bytes(image.to_bytes())
        np.testing.assert_array_equal(decoded(file), VOLUME[:, :, 4])
    image = turned("PIR")
    oblique = image.affine.copy()
    oblique[:3, :3] = turn @ oblique[:3, :3]
    nibabel.save(nibabel.Nifti1Image(image.dataobj, oblique), file)
    np.testing.assert_array_equal(decoded(file), VOLUME[:, :, 4])
    for wrong in (np.diag([1, 1, 0, 1]), np.diag([np.nan, 1, 1, 1])):
        image.header.set_sform(wrong, 1)
        file.write_bytes(image.header.binaryblock + bytes(4) + np.asarray(image.dataobj).tobytes())
        refused("leads the axes nowhere", pixels.encode, file, GREY, kind=DataError)


@pytest.mark.parametrize("code", ["RAS", "LPS", "SRA", "IAL", "ASR"])
def test_a_file_of_one_slice_is_that_slice(tmp_path, code):
    file, image = tmp_path / "x.nii", nibabel.Nifti1Image(VOLUME[:, :, 4:5], np.eye(4))
    nibabel.save(turned(code, image), file)
    np.testing.assert_array_equal(decoded(file), VOLUME[:, :, 4])


def test_a_slice_across_the_stored_order_takes_the_memory_that_is_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "x.nii"
    image = nibabel.Nifti1Image(np.zeros((64, 64, 640), np.int16), np.eye(4))
    nibabel.save(turned("SAR", image), file)
    taken, reserve = [], pixels.reserve_memory
    monkeypatch.setattr(pixels, "reserve_memory", lambda x: taken.append(x) or reserve(x))
    window = GREY._replace(window=(0, 1))
    with at_most(2**-20 * 2 * image.dataobj.nbytes + 2):
        pixels.encode(file, window)
    assert taken[0] >= 2 * image.dataobj.nbytes
    nibabel.save(image, file)
    pixels.encode(file, window)
    assert taken[-1] < image.dataobj.nbytes  # a slice along the stored order


BIG = np.random.default_rng(0).integers(0, 255, (150, 150, 4), np.uint8).repeat(10, 0).repeat(10, 1)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("png", "RGBA"), ("png", "P"), ("gif", "P"), ("jpg", "RGB"), ("tif", "I;16"), ("jp2", "RGBA"),
     ("webp", "RGBA"), ("npy", "f8")],
)  # fmt: skip
def test_an_image_takes_no_more_than_it_is_said_to(tmp_path, kind, mode):
    file = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(file, BIG[..., :3].astype(mode))
    else:
        made = in_mode(BIG[..., 0], mode) if mode == "I;16" else Image.fromarray(BIG).convert(mode)
        made.save(file)
    how = COLOUR._replace(window=(0, 255) if kind == "npy" else None)
    with pixels.open_pixels(file, how) as opened:
        most = opened.num_bytes / 2**20
    with at_most(most + 2, traced=False):
        pixels.encode(file, how)


def test_what_a_large_image_takes_is_seen(tmp_path):
    """The control: of so many bytes, more than malloc ever keeps, none were freed before."""
    file = tmp_path / "x.png"
    Image.fromarray(BIG.repeat(2, 0).repeat(2, 1)).save(file, compress_level=1)
    with pytest.raises(AssertionError, match="resident"), at_most(9, traced=False):
        pixels.encode(file, COLOUR)


def test_what_would_take_more_than_the_budget_is_refused_before_it_is_decoded(
    tmp_path, monkeypatch
):
    file = tmp_path / "x.png"
    Image.fromarray(BIG).save(file)
    assert pixels.encode(file, GREY).png
    monkeypatch.setattr(pixels, "DECODING", 2**24)
    with at_most(1):
        refused("x.png: .*decoding takes up to 72,", pixels.encode, file, GREY, kind=DataError)
    assert pixels.check_ranges([file], GREY) == 0


def test_a_tile_larger_than_its_image_counts(tmp_path):
    tags = {256: 6, 257: 4, 258: 8, 259: 8, 262: 1, 277: 1, 322: 65_520, 323: 65_520, 324: 200}
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, x) for tag, x in {**tags, 325: 99}.items())
    content = b"II*\0" + struct.pack("<IH", 8, len(tags) + 1) + rows + bytes(4)
    (tmp_path / "x.tif").write_bytes(content.ljust(200, b"\0") + zlib.compress(bytes(9)).ljust(99))
    with at_most(8):
        refused("decoding takes up to 8,585", pixels.encode, tmp_path / "x.tif", GREY,
                kind=DataError)  # fmt: skip


@pytest.mark.parametrize("kind", ["JPEG", "JPEG2000"])
def test_a_frame_larger_than_its_dicom_file_says_is_not_decoded(tmp_path, kind):
    syntax = uid.JPEGBaseline8Bit if kind == "JPEG" else uid.JPEG2000Lossless
    for size, message in (((6, 4), ""), ((600, 400), r"\(400, 600\) pixels in a file of 4 × 6")):
        options = {"no_jp2": True} if kind == "JPEG2000" else {}
        frame = pydicom.encaps.encapsulate([saved(flat(7, size=size), kind, **options)])
        file = tmp_path / "x.dcm"
        file.write_bytes(dicom(full(7, np.uint8), syntax=syntax, PixelData=frame))
        if message:
            refused(message, pixels.encode, file, GREY, kind=DataError)
        else:
            assert np.abs(decoded(file).astype(int) - 7).max() < 3


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
CODED = {  # of 64 × 64 pixels
    "JPEG": saved(Image.fromarray(NOISE), "JPEG"),
    "JPEG2000": saved(Image.fromarray(NOISE), "JPEG2000", no_jp2=True),
    "lossless": b"\xff\xd8\xff\xc3\0\x0b\x08\0\x40\0\x40\x01\x01\x11\0" + bytes(20),
    "LS": b"\xff\xd8\xff\xf7\0\x0b\x08\0\x40\0\x40\x01\x01\x11\0" + bytes(20),
}
GDCM = "which no installed package decodes; pip install python-gdcm, or save it uncompressed"
COMPRESSED = {  # syntax, frame -> what is said of it
    "JPEG Lossless": (uid.JPEGLossless, CODED["lossless"], rf"4\.57\), {GDCM}"),
    "JPEG Lossless SV1": (uid.JPEGLosslessSV1, CODED["lossless"], rf"4\.70\), {GDCM}"),
    "JPEG-LS": (uid.JPEGLSLossless, CODED["LS"], rf"JPEG-LS Lossless.*4\.80\), {GDCM}"),
    "JPEG-LS near": (uid.JPEGLSNearLossless, CODED["LS"], rf"4\.81\), {GDCM}"),
    "HTJ2K": (uid.HTJ2K, CODED["JPEG2000"], "pip install pylibjpeg pylibjpeg-openjpeg, or save it"),
    "a film": (uid.MPEG2MPML, b"abcd", "MPEG2.*, which is not read; save it uncompressed"),
    "JPEG 2000, cut": (
        uid.JPEG2000Lossless, CODED["JPEG2000"][:400], "; damaged or cut short JPEG 2000"),
    "JPEG 2000, damaged": (
        uid.JPEG2000, CODED["JPEG2000"][:200].ljust(4000, b"\0"), "; damaged or cut short JPEG 2"),
    "JPEG, cut": (uid.JPEGBaseline8Bit, CODED["JPEG"][:300], "; damaged or cut short JPEG Base"),
    "run lengths, damaged": (uid.RLELossless, bytes(70), "; damaged or cut short RLE Lossless"),
}  # fmt: skip


def compressed(syntax, frame):
    pixel_data = pydicom.encaps.encapsulate([frame])
    return dicom(full(7, np.uint8, (64, 64)), syntax=syntax, PixelData=pixel_data)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_dicom_that_is_not_read_is_one_line_with_a_remedy(tmp_path, caplog, kind):
    *content, message = COMPRESSED[kind]
    file = tmp_path / "x.dcm"
    file.write_bytes(compressed(*content))
    for _ in range(2):  # each read of a file
        refused(message, pixels.encode, file, GREY, kind=DataError)
        refused(message, pixels.decode, file, GREY, kind=DataError)
    assert caplog.records == []
    pydicom.config.logger.setLevel(logging.WARNING)  # the control: pydicom does log
    if "damaged or cut" in message:
        with contextlib.suppress(RuntimeError):
            _ = pydicom.dcmread(file).pixel_array
        assert caplog.records != []


def test_an_import_without_a_readable_image_says_why(tmp_path):
    for number, label in enumerate("ab" * 8):
        file = tmp_path / "images" / label / f"{number}.dcm"
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = "JPEG 2000, cut" if number else "JPEG-LS"
        file.write_bytes(compressed(*COMPRESSED[kind][:2]))
    done = run_command("bam", "data", "import", str(tmp_path / "images"),
                       f"--out={tmp_path / 'data'}", "--size=16", "--test=0.5")  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert re.search(rf"no readable image left for the \w+ split; a/0.dcm \(.*{GDCM}", line)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["JPEG", "JPEG2000"])
def test_whole_frames_of_these_are_read(tmp_path, kind):
    syntax = uid.JPEGBaseline8Bit if kind == "JPEG" else uid.JPEG2000Lossless
    (tmp_path / "x.dcm").write_bytes(compressed(syntax, CODED[kind]))
    same = Preprocessing((64, 64), 1)
    assert np.abs(pixels.decode(tmp_path / "x.dcm", same)[..., 0].astype(int) - NOISE).max() < 60


@pytest.mark.parametrize("name", ["pydicom", "pillow_heif", "nibabel"])
def test_a_package_that_is_not_installed_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    kind = {"pydicom": "DICOM", "pillow_heif": "HEIC", "nibabel": "NIfTI"}[name]
    file = tmp_path / f"x.{KINDS[kind][0]}"
    file.write_bytes(KINDS[kind][1])
    for call in (pixels.encode, lambda x, how: pixels.check_ranges([x], how)):
        refused(
            rf"{name} is not installed: .*\[{kind.lower()}\]",
            call,
            file,
            GREY,
            kind=MissingExtraError,
        )


@pytest.mark.parametrize("record", [GREY, Preprocessing((16, 24), 3, (-1000.0, 400.5), "black")])
def test_a_record_of_preprocessing_comes_back_from_its_json(record):
    assert Preprocessing.from_json(json.loads(json.dumps(record.as_json()))) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 8}, "has no len"),
        ({"size": [8, 3]}, r"size \(8, 3\) must be a height and a width from 4 to 4096"),
        ({"size": [8, 8, 8]}, "a height and a width"),
        ({"size": [8.0, 8]}, "a height and a width"),
        ({"channels": 2}, "channels must be .*got 2"),
        ({"channels": True}, "channels must be .*got True"),
        ({"window": [5, 5]}, "LOW < HIGH"),
        ({"window": [0, float("nan")]}, "two finite numbers"),
        ({"window": [0, float("inf")]}, "two finite numbers"),
        ({"window": [0, 10**400]}, "too large"),
        ({"window": []}, "two finite numbers"),
        ({"background": "mauve"}, "white or black"),
        ({"more": 1}, "unexpected"),
    ],
)
def test_json_that_is_no_preprocessing_is_one_line(change, message):
    refused(f"preprocessing .*{message}", Preprocessing.from_json, GREY.as_json() | change)


def scans(folder, *values, kind=np.uint16):
    for number, value in enumerate(values):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        level, shape = (value[0], (30, 40)) if isinstance(value, tuple) else (0, (4, 6))
        numbers = full(level, kind, shape)
        numbers[1, 1] = np.max(value)
        np.save(place / f"{number}.npy", numbers)
    return listing.in_class_folders(folder).examples


@pytest.mark.parametrize(
    ("values", "kind", "seen", "example"),
    [
        (
            [3000, 4000, 3500, 10],
            np.uint16,
            "4 files of 16 bits .0 to 65,535. would look dark or grey .NOT PRIVATE.; ",
            "0,4095",
        ),
        ([255] * 4, np.uint16, "", "0,255"),
        ([0] * 4, np.uint16, "", "0,1"),
        ([4095, 4095, 4095, 65535], np.uint16, "", "0,65535"),
        (
            [-900, 1800, 5, 5],
            np.int16,
            "4 files of signed or floating-point numbers would",
            "-1024,2047",
        ),
        ([0.5, 0.1, 0.9, 0.75], np.float32, "", "0,1"),
        ([-1.0, 1.0, 0.0, 0.0], np.float64, "", "-1,1"),
        ([(4000, 65535)] * 4, np.uint16, "", "0,4095"),  # letters burnt in
        ([65535, 65535, 4000, 4000], np.uint16, "", "0,65535"),  # two devices
        ([(50000, 60000)] * 4, np.uint16, "", "49152,65535"),
        ([65000, 60000, 65535, 100], np.uint16, None, None),
    ],
)
def test_a_set_that_would_be_dark_is_refused_before_anything_is_written(
    tmp_path, values, kind, seen, example
):
    examples, out = scans(tmp_path / "in", *values, kind=kind), tmp_path / "out"
    options = importing.Options(GREY, ("a", "b"), 0.5, strict=False)
    examples = [x._replace(split=("train", "test")[i // 2]) for i, x in enumerate(examples)]
    run = lambda options: importing.run(tmp_path / "in", examples, out, options)  # noqa: E731
    if seen is not None:
        with pytest.raises(DataError, match=f"{seen}.*--window={example}$") as error:
            run(options)
        # Of the numbers themselves only powers of two: a window is published.
        assert not {"1800", "1,800", "3000", "4000", "4,000"} & set(
            re.findall(r"[\d,]+", str(error.value))
        )
        assert not out.exists()
        low, high = map(float, example.split(","))
        options = options._replace(preprocessing=GREY._replace(window=(low, high)))
    manifest = run(options)
    assert manifest["num_examples"] == {"train": 2, "test": 2} and not manifest["left_out"]
    assert manifest["preprocessing"] == options.preprocessing.as_json()


def test_files_of_several_frames_are_counted(tmp_path):
    kinds = ("GIF, first of two", "APNG", "WebP, first of two", "TIFF of two pages", "GIF", "DICOM")
    for number, kind in enumerate(kinds):
        (tmp_path / f"{number}.{KINDS[kind][0]}").write_bytes(KINDS[kind][1])
    assert pixels.check_ranges(sorted(tmp_path.iterdir()), GREY) == 4


def chunks(png):
    names, at = [], 8
    while at < len(png):
        names.append(png[at + 4 : at + 8])
        at += int.from_bytes(png[at : at + 4]) + 12
    return names


def test_the_user_of_a_dicom_file_is_its_patient_and_nothing_else_is_kept(tmp_path):
    file = tmp_path / "x.dcm"
    file.write_bytes(dicom(full(77, np.uint8)))
    assert pixels.dicom_user(file) == ("p7", "")
    written = pixels.encode(file, GREY).png
    assert b"Doe" in file.read_bytes() and b"Doe" not in written and b"p7" not in written
    assert chunks(written) == [b"IHDR", b"IDAT", b"IEND"]
    file.write_bytes(dicom(full(77, np.uint8), PatientID=""))
    refused("no PatientID", pixels.dicom_user, file, kind=DataError)
    file.write_bytes(KINDS["GIF"][1])
    refused("x.dcm", pixels.dicom_user, file, kind=DataError)


SC = uid.SecondaryCaptureImageStorage
TYPES = {  # tags of a DICOM file -> what it is, if it is no plain scan
    "plain": ({}, ""),
    "original": ({"ImageType": ["ORIGINAL", "PRIMARY", "AXIAL"]}, ""),
    "reformatted": ({"ImageType": ["DERIVED", "SECONDARY", "MPR"]}, ""),
    "digitized film": ({"ConversionType": "DF"}, ""),
    "no letters": ({"BurnedInAnnotation": "NO"}, ""),
    "visible light": ({"SOPClassUID": uid.VLPhotographicImageStorage}, ""),
    "localizer": ({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}, "localizers"),
    "topogram": ({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER", "CT_SOM5 TOP"]}, "localizers"),
    "one type": ({"ImageType": "LOCALIZER"}, "localizers"),
    "secondary capture": ({"SOPClassUID": SC}, "secondary captures"),
    "many captures": ({"SOPClassUID": f"{SC}.2"}, "secondary captures"),
    "screen": ({"ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"]}, "secondary captures"),
    "workstation": ({"ConversionType": "WSD"}, "secondary captures"),
    "scanned document": ({"ConversionType": "SD"}, "secondary captures"),
    "burnt in": ({"BurnedInAnnotation": "YES"}, pixels.BURNT_IN),
    "burnt into a capture": ({"BurnedInAnnotation": "YES", "SOPClassUID": SC}, pixels.BURNT_IN),
    "segmentation": ({"SOPClassUID": uid.SegmentationStorage}, "segmentations"),
    "screening": ({"ImageType": ["ORIGINAL", "PRIMARY", "SCREENING"]}, ""),
    "no localizer": ({"ImageType": ["ORIGINAL", "PRIMARY", "NONLOCALIZER"]}, ""),
    "scout": ({"ImageType": ["ORIGINAL", "PRIMARY", "SCOUT"]}, "localizers"),
    "topogram by name": ({"ImageType": ["ORIGINAL", "PRIMARY", "TOPOGRAM"]}, "localizers"),
    "CT": ({"Modality": "CT"}, ""),
    "segments": ({"Modality": "SEG"}, "segmentations"),
    **{x: ({"Modality": x}, "reports, plans and doses") for x in pixels._NO_SCANS},
    "burnt in, of two": ({"BurnedInAnnotation": ["NO", "YES"]}, pixels.BURNT_IN),
    "burnt in, otherwise": ({"BurnedInAnnotation": "TRUE"}, pixels.BURNT_IN),
    "no letters, twice": ({"BurnedInAnnotation": ["NO", "NO"]}, ""),
    "no word on letters": ({"BurnedInAnnotation": ""}, ""),
}


@pytest.mark.parametrize("kind", TYPES)
def test_a_dicom_file_that_is_no_plain_scan_says_so(tmp_path, kind):
    tags, expected = TYPES[kind]
    file = tmp_path / "IM0001"  # without a suffix
    file.write_bytes(dicom(full(9), **tags))
    assert pixels.dicom_type(file) == expected


@pytest.mark.parametrize("kind", [SC, uid.CTImageStorage])
def test_a_dicom_file_without_a_sop_class_has_that_of_its_meta_information(tmp_path, kind):
    data = pydicom.dcmread(io.BytesIO(dicom(full(9))))
    del data.SOPClassUID
    data.file_meta.MediaStorageSOPClassUID = kind
    data.save_as(tmp_path / "x.dcm")
    assert pixels.dicom_type(tmp_path / "x.dcm") == ("secondary captures" if kind == SC else "")


def test_what_is_no_dicom_or_cannot_be_read_has_no_type(tmp_path):
    for name, content in {"x.png": saved(flat(7)), "y.dcm": b"nothing", "z.dcm": b""}.items():
        (tmp_path / name).write_bytes(content)
        assert pixels.dicom_type(tmp_path / name) == ""
    assert pixels.dicom_type(tmp_path / "missing.dcm") == ""
    assert pixels.dicom_type(tmp_path) == ""


@pytest.mark.parametrize("in_table", (False, True))
def test_dicom_files_that_are_no_plain_scans_are_counted_and_left_out(tmp_path, in_table):
    folder, rows = tmp_path / "in", ["file,label"]
    kinds = [*["plain"] * 20, "localizer", "localizer", "workstation", "burnt in", "segmentation"]
    for number, kind in enumerate(kinds):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.dcm").write_bytes(dicom(full(number, np.uint8), **TYPES[kind][0]))
        rows.append(f"{'ab'[number % 2]}/{number}.dcm,{'ab'[number % 2]}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    flags = ["--size=4x6", "--channels=1", "--test=0.4", "--window=0,255"]
    flags += [f"--labels={tmp_path / 't.csv'}", "--classes=a,b"] if in_table else []
    run = lambda out, *more: run_command(  # noqa: E731
        "bam", "data", "import", str(folder), f"--out={tmp_path / out}", *flags, *more
    )
    done = run("out")
    assert done.returncode == 0, done.stderr
    for line in (
        "2 DICOM files (localizers), as a/20.dcm: left out; --all_dicom imports them",
        "1 DICOM file (pictures with burnt-in annotation, which may show a patient's name), as b",
        "25 images: ",
        "0 left out, 2 localizers, ",
        ", 1 pictures with burnt-in annotation",
        ", 1 secondary captures",
        ", 1 segmentations",
    ):
        assert line in done.stdout, done.stdout
    assert sum(importing.read_manifest(tmp_path / "out")["num_examples"].values()) == 20
    done = run("all", "--all_dicom")
    assert done.returncode == 0 and "), as a/20.dcm: imported by --all_dicom" in done.stdout
    assert sum(importing.read_manifest(tmp_path / "all")["num_examples"].values()) == 25


def test_a_class_of_captures_alone_is_refused_with_the_flag_that_imports_it(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    for number in range(12):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        tags = {"SOPClassUID": SC} if number % 2 and number > 2 else {}
        (place / f"{number}.dcm").write_bytes(dicom(full(number, np.uint8), **tags))
    flags = (f"--out={out}", "--size=4x6", "--test=0.4")
    done = run_command("bam", "data", "import", str(folder), *flags)
    assert done.returncode == 2 and not out.exists()
    why = "one image of class b is left without 5 secondary captures: add --all_dicom"
    assert why in done.stderr
    assert run_command("bam", "data", "import", str(folder), *flags, "--all_dicom").returncode == 0


def test_the_command_takes_users_from_dicom_files_and_names_what_has_none(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    for number in range(25):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        content = dicom(full(number, np.uint8), PatientID=f"p{number // 2}" if number else "")
        (place / f"{number}.dcm").write_bytes(content)
    flags = (f"--out={out}", "--size=4x6", "--channels=1", "--user_column=PatientID")
    done = run_command("bam", "data", "import", str(folder), *flags)
    assert done.returncode == 0, done.stderr
    assert "left out: a/0.dcm (no PatientID in it)\n" in done.stdout and ", 1 left" in done.stdout
    manifest = importing.read_manifest(out)
    assert manifest["ids"] == "user" and sum(manifest["num_examples"].values()) == 24
    ids = parquet.read_ids(out, "user").tolist()  # two images each, but for the first
    assert 1 < len(set(ids)) <= len(ids) // 2 + 1
    bare = tmp_path / "bare"
    for place in "aabb":
        (bare / place).mkdir(parents=True, exist_ok=True)
        flat(7).save(bare / place / f"{len(list(bare.rglob('*')))}.png")
    done = run_command("bam", "data", "import", str(bare), f"--out={bare}/out", *flags[1:])
    assert done.returncode == 2 and "no DICOM file with a PatientID" in done.stderr
    assert not done.stdout  # and no line for each file
    table = tmp_path / "table.csv"
    rows = [f"{'ab'[i % 2]}/{i}.dcm,{'ab'[i % 2]}" for i in range(1, 25)]
    table.write_text("\n".join(["file,label", *rows]))
    flags = (f"--out={tmp_path / 'two'}", *flags[1:], f"--labels={table}", "--classes=a,b")
    done = run_command("bam", "data", "import", str(folder), *flags)
    assert done.returncode == 0 and "groups=user" in done.stdout, done.stderr
    table.write_text("\n".join(["file,label,PatientID", *(f"{x}," for x in rows)]))
    done = run_command("bam", "data", "import", str(folder), f"--out={tmp_path / 'no'}", *flags[1:])
    assert done.returncode == 2 and "row 2 lacks a value of PatientID" in done.stderr
