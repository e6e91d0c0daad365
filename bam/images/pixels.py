"""Decodes an image file of any common format into a PNG of one size and 8 bits a channel."""

import contextlib
import gzip
import io
import logging
import math
import re
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import UInt8

from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.errors import InputError
from bam.extras import MissingExtraError, needs
from bam.privacy.user_ids import is_missing

with needs("data"):
    from PIL import Image, ImageCms, ImageOps

Image.init()
# The formats that Pillow reads without starting another program; an old Pillow lacks AVIF.
SAFE = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "JPEG2000", "AVIF")
FORMATS = tuple(x for x in SAFE if x in Image.OPEN)
MODES = {1: "L", 3: "RGB"}  # channels -> mode of Pillow
LIMIT = 2**27  # pixels of a file
# Bytes of memory for decoding, shared by all threads of a process.
DECODING = 2**32
# Bytes of memory a pixel, from the file to 8-bit colours: at most 25 measured, for JPEG 2000.
PIXEL_BYTES = 32
LOST = ("of one colour", "of two or three colours", "enlarged more than four times")
ENLARGED = 4
BITS, PHOTOMETRIC, ORIENTATION, SAMPLE_FORMAT = 258, 262, 274, 339  # tags of TIFF and EXIF
CHANNELS, TILE_WIDTH, TILE_HEIGHT = 277, 322, 323
NIFTI_BEGINNING = 2**24  # bytes before the numbers of a NIfTI file: its header and extensions
_NO_IMAGE = {  # first bytes of a failed download -> the error
    b"version https://git-lfs": "a Git LFS pointer, not the image; run git lfs pull",
    **dict.fromkeys((b"<!doctype html", b"<html"), "a web page, not an image; download it again"),
}
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
BURNT_IN = "pictures with burnt-in annotation"
_SECONDARY = "1.2.840.10008.5.1.4.1.1.7"  # SOP classes of DICOM, also with more numbers behind
_SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66"
_TYPES = ["ImageType", "SOPClassUID", "ConversionType", "BurnedInAnnotation", "Modality"]
_LOCALIZERS = {"LOCALIZER", "SCOUT", "TOPOGRAM"}  # values of ImageType
_DRAWN = {"WSD", "SD", "DRW", "SYN"}  # of ConversionType: from a workstation, drawn, scanned
_NO_SCANS = ("RTDOSE", "RTSTRUCT", "RTPLAN", "SR", "PR")  # of Modality
TURNS = dict(enumerate((0, 3, 1, 5, 4, 6, 2), start=2))  # EXIF's orientation -> Pillow's transpose

decoding_room = {"free": DECODING}
_changed = threading.Condition()


class _Opened(NamedTuple):
    """The header of a file that is not decoded yet, and a function that decodes it."""

    size: tuple[int, int]  # height and width
    bits: int | None  # bits of an unsigned number; None: signed or float, without a declared range
    read: Callable[[], Image.Image | np.ndarray]  # 8 bits, or numbers [h, w] or [h, w, channels]
    has_frames: bool = False  # more than one frame or page
    inverted: bool = False  # the least number is white
    pixel_bytes: int = PIXEL_BYTES  # most memory a pixel, for decoding and all that follows
    more_bytes: int = 0  # most memory beyond that, for the file
    is_unoriented: bool = False  # a volume that does not say where its axes lead

    @property
    def num_bytes(self) -> int:
        """Most memory that the image takes until it is resized."""
        return self.size[0] * self.size[1] * self.pixel_bytes + self.more_bytes


@contextlib.contextmanager
def reserve_memory(num_bytes: int) -> Iterator[None]:
    """Waits until `num_bytes` of the `DECODING` bytes that threads share are free, and holds them.

    A thread must not nest two calls, or threads could wait for each other for ever. InputError for
    more than `DECODING`.
    """
    if num_bytes > DECODING:
        raise InputError(f"decoding takes up to {num_bytes:,} bytes; at most {DECODING:,}")
    with _changed:
        _changed.wait_for(lambda: num_bytes <= decoding_room["free"])
        decoding_room["free"] -= num_bytes
    try:
        yield
    finally:
        with _changed:
            decoding_room["free"] += num_bytes
            _changed.notify_all()


class WindowError(DataError):
    """The numbers of files need a window. `what` is the message without the remedy of an import."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what


class Encoded(NamedTuple):
    """A picture, with a warning if it may have lost its content.

    Attributes:
      png: pixels of 8 bits a channel, without metadata.
      lost: one of `LOST`, or "".
      numbers: the least and the largest number of the file, if a window left one colour only.
      is_unoriented: whether the file is a volume that does not say where its axes lead.
    """

    png: bytes
    lost: str = ""
    numbers: tuple[float, float] | None = None
    is_unoriented: bool = False


def encode(file: Path, preprocessing: Preprocessing) -> Encoded:
    """Returns an image file as a PNG of 8 bits a channel.

    The picture is as a viewer shows it: the first frame, upright, in sRGB, on the background. It is
    resized (Lanczos) until it covers the size, then its middle is cut out. Raises DataError if the
    file cannot be decoded.
    """
    written = io.BytesIO()
    image, opened = _fit_to_size(file, preprocessing)
    image.save(written, "PNG")
    colours = image.getcolors(3)  # None: more than three
    is_small = any(ENLARGED * x < y for x, y in zip(opened.size, preprocessing.size, strict=True))
    lost = LOST[min(len(colours), 2) - 1] if colours else LOST[2] if is_small else ""
    is_emptied = lost == LOST[0] and preprocessing.window is not None
    ends = _ends(file, preprocessing) if is_emptied else None
    return Encoded(written.getvalue(), lost, ends and ends[:2], opened.is_unoriented)


def decode(file: Path, preprocessing: Preprocessing) -> UInt8[np.ndarray, "h w c"]:
    """Returns the pixels of the PNG that `encode` makes."""
    return np.asarray(_fit_to_size(file, preprocessing)[0]).reshape(preprocessing.shape)


def _fit_to_size(file: Path, preprocessing: Preprocessing) -> tuple[Image.Image, _Opened]:
    """Returns the picture in its size, and what the header of the file says."""
    result = PIXEL_BYTES * math.prod(preprocessing.size)
    with open_pixels(file, preprocessing) as opened, reserve_memory(opened.num_bytes + result):
        image = opened.read()
        if isinstance(image, np.ndarray):
            image = _scale(image, opened.bits, preprocessing.window)
            image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
        image = _to_srgb(image, preprocessing.background)
        image = ImageOps.invert(image) if opened.inverted else image
        image = image.convert(MODES[preprocessing.channels])
        fitted = ImageOps.fit(image, preprocessing.size[::-1], Image.Resampling.LANCZOS)
        fitted.info.clear()
    return fitted, opened


def check_ranges(files: Sequence[Path], preprocessing: Preprocessing) -> int:
    """Checks the ranges of files and counts those with several frames or pages.

    Only the first frame or page is used.

    Raises:
      WindowError: if there is no window, and files with more than 8 bits use too little of the
        range of their format, or the format declares none. They would become black or grey.
    """
    deep, num_animated = dict[int | None, list[Path]](), 0
    for file in files:
        with contextlib.suppress(DataError), open_pixels(file, preprocessing) as opened:
            num_animated += opened.has_frames
            if preprocessing.window is None and (opened.bits is None or opened.bits > 8):
                deep.setdefault(opened.bits, []).append(file)
    for bits, same_bits in sorted(deep.items(), key=lambda x: x[0] is None):
        _check_range(bits, same_bits, preprocessing)
    return num_animated


def _ends(file: Path, preprocessing: Preprocessing) -> tuple[float, float, float] | None:
    """Returns the least, the largest and a bright number of a file.

    Returns None for a file of 8 bits and for one without a finite number.
    """
    with (
        contextlib.suppress(DataError),
        open_pixels(file, preprocessing) as opened,
        reserve_memory(opened.num_bytes),
    ):
        if opened.bits is not None and opened.bits <= 8:
            return None
        numbers = np.asarray(opened.read())
        numbers = numbers[..., :-1] if numbers.shape[2:] in ((2,), (4,)) else numbers
        if (finite := numbers[np.isfinite(numbers)]).size:
            bright = np.quantile(finite, 0.99, method="nearest")  # not white letters burnt in
            return finite.min().item(), finite.max().item(), bright.item()
    return None


def _check_range(bits: int | None, files: list[Path], preprocessing: Preprocessing) -> None:
    """WindowError if files of the same `bits` would look dark or grey without a window."""
    sample = files[:: 1 + len(files) // 256]  # decoding all would take as long as the import
    ends = [x for file in sample if (x := _ends(file, preprocessing))]
    if not ends:
        return
    low, high = min(x[0] for x in ends), max(x[1] for x in ends)
    most = math.inf if bits is None else 2**bits - 1
    is_used = high >= 0.75 * most and high - low >= most / 2
    darkest, usual = np.quantile([x[2] for x in ends], (0.1, 0.5))  # devices may differ
    if is_used and darkest >= most / 16 and usual >= most / 8:
        return
    kind = f"{bits} bits (0 to {most:,})" if bits else "signed or floating-point numbers"
    black, white = window_around(low, max(x[2] for x in ends) if is_used else high)
    raise WindowError(
        f"{len(files):,} file{'s' * (len(files) > 1)} of {kind} would look dark or grey "
        "(NOT PRIVATE)",
        "add --window=LOW,HIGH, public constants of the device that made them, for example "
        f"--window={black:.12g},{white:.12g}",
    )


def window_around(low: float, high: float) -> tuple[float, float]:
    """A window of powers of two around numbers, whose exact ends belong to somebody's image."""
    power = lambda x: 2.0 ** math.frexp(math.nextafter(x, 0))[1]  # noqa: E731
    is_int = isinstance(high, int)
    end = is_int + high
    base = low if 0 < low < end - is_int else 0
    span = power(end - base)
    black = -power(low) if low < 0 else base // span * span
    return black, -(-end // span) * span - is_int or 1


def dicom_user(file: Path) -> tuple[str, str]:
    """Returns the PatientID of a DICOM file, and its IssuerOfPatientID or "".

    Raises DataError if there is no PatientID.
    """
    user, issuer = dicom_tags(file, ("PatientID", "IssuerOfPatientID"))
    if is_missing(user):
        raise DataError(f"{file}: no PatientID in it")
    return user, "" if is_missing(issuer) else issuer


def dicom_tags(file: Path, names: Sequence[str]) -> list[str]:
    """Returns the values of these tags of a DICOM file as text.

    A missing tag is "". Raises DataError for a file that cannot be read as DICOM.
    """
    if not file.is_file():  # opening a pipe would wait
        raise DataError(f"{file}: not an ordinary file")
    with _one_line(file), file.open("rb") as stream:
        header = _dicom_header(stream, list(names))
        return [str(header.get(name) or "").strip() for name in names]


def dicom_type(file: Path) -> str:
    """Says by its header what kind of picture a DICOM file is.

    Returns "" for a plain scan. A file that cannot be read, or is not DICOM, is "", too: decoding
    it says more.
    """
    with contextlib.suppress(DataError, OSError):
        if not file.is_file() or not _is_dicom(_head(file), file.name):
            return ""
        kinds, sops, conversion, burnt_in, modality = _values(file, _TYPES)
        if set(burnt_in) - {"NO"}:
            return BURNT_IN
        if _LOCALIZERS.intersection(kinds):
            return "localizers"
        is_of = lambda uid: any(f"{x}.".startswith(f"{uid}.") for x in sops)  # noqa: E731
        words = {word for x in kinds for word in re.split(r"\W|_", x)}
        if "SCREEN" in words or _DRAWN.intersection(conversion) or is_of(_SECONDARY):
            return "secondary captures"
        if "SEG" in modality or is_of(_SEGMENTATION):
            return "segmentations"
        return "reports, plans and doses" if not set(modality).isdisjoint(_NO_SCANS) else ""
    return ""


def _values(file: Path, names: Sequence[str]) -> list[list[str]]:
    """The values of these tags of a DICOM file in upper case, [] for an empty or missing one.

    A missing SOP class is that of the file's meta information.
    """
    with _one_line(file), file.open("rb") as stream:
        header = _dicom_header(stream, list(names))
    values = {name: header.get(name) for name in names}
    values["SOPClassUID"] = values["SOPClassUID"] or header.file_meta.get("MediaStorageSOPClassUID")
    return [_texts(x) for x in values.values()]


def _texts(value: Any) -> list[str]:
    """The values of a tag, also of one whose type is unknown and which is bytes, as texts."""
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    one = value is None or isinstance(value, str)
    texts = (value or "").split("\\") if one else [str(x) for x in np.atleast_1d(value)]
    return [y for x in texts if (y := x.strip(" \0\t").upper())]


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(132)


def _is_dicom(head: bytes, name: str) -> bool:
    return head[128:132] == b"DICM" or name.lower().endswith(DICOM_SUFFIXES)


@contextlib.contextmanager
def _one_line(file: Path) -> Iterator[None]:
    """Turns each error of a decoder into a DataError of one line with the name of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders warn of sizes, which `open_pixels` checks
            yield
    except MissingExtraError:
        raise
    # Decoders raise OSError, SyntaxError, ValueError, struct.error and more.
    except Exception as error:
        text = str(error).partition(" <_io")[0]  # Pillow names the stream
        text = text.partition(" - the dataset may")[0]  # pydicom guesses
        if lacks := re.search(r"'FileDataset' object has no attribute '(\w+)'", text):
            raise DataError(
                f"{file}: the DICOM file has no image, or a damaged one (no {lacks[1]})"
            ) from error
        if "force=True" in text:  # which is an argument of pydicom
            raise DataError(
                f"{file}: not a DICOM file, or its first bytes are lost; copy it again"
            ) from error
        raise DataError(f"{file}: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def open_pixels(file: Path, preprocessing: Preprocessing) -> Iterator[_Opened]:
    """Opens a file by the format of its first bytes, and checks the size that its header declares.

    Nothing is decoded before `read` of the result is called. DataError for another format and for a
    declared size beyond `LIMIT`.
    """
    if not file.is_file():  # opening a pipe would wait
        raise DataError(f"{file}: not an ordinary file")
    with _one_line(file), file.open("rb") as stream:
        head, name = stream.read(132), file.name.lower()
        stream.seek(0)
        for beginning, kind in _NO_IMAGE.items():
            if head.lower().startswith(beginning):
                raise InputError(kind)
        is_mapped = head.startswith(b"\x93NUMPY") or name.endswith((".nii", ".nii.gz"))
        if not is_mapped and (num_bytes := file.stat().st_size) > DECODING:
            raise InputError(f"{num_bytes:,} bytes; at most {DECODING:,}")
        if head.startswith(b"\x93NUMPY"):
            opened = _array(np.load(file, mmap_mode="r", allow_pickle=False))
        elif _is_dicom(head, name):
            opened = _dicom(stream, preprocessing.window)
        elif name.endswith((".nii", ".nii.gz")):
            opened = _nifti(file)
        else:
            opened = _pillow(stream, head)
        if not 0 < opened.size[0] * opened.size[1] <= LIMIT:
            raise InputError(f"{opened.size[0]} × {opened.size[1]} pixels; at most {LIMIT:,}")
        yield opened


def _pillow(stream: BinaryIO, head: bytes) -> _Opened:
    """Opens a file that Pillow reads.

    It reads HEIC, too, with the reader of an extra.
    """
    formats = FORMATS
    if head[4:8] == b"ftyp" and b"avif" not in head[8:64] and b"avis" not in head[8:64]:
        with needs("heic"):
            import pillow_heif
        pillow_heif.register_heif_opener()
        formats = ("HEIF",)
    image: Any = Image.open(stream, formats=formats)
    args, tags = image.tile[0].args if image.tile else "", getattr(image, "tag_v2", {})
    raw = str(args[0] if isinstance(args, tuple) else args)  # Pillow's name of the file's pixels
    if raw in ("L;2", "L;4") and "transparency" in image.info:  # from units of the file to 8 bits
        image.info["transparency"] *= 255 // (2 ** int(raw[-1]) - 1)
    colour = raw.startswith(("RGB;16", "RGBX;16", "RGBA;16", "RGBa;16", "LA;16"))
    signed = tags.get(SAMPLE_FORMAT, (1,))[0] == 2
    deep = colour or signed or image.mode[0] in "IF"
    depth = tags.get(BITS, (16,))[0] if deep else 8

    def read() -> Image.Image | np.ndarray:
        if not deep:
            return _upright(image)
        numbers = _both_bytes(stream, raw) if colour else np.asarray(_upright(image))
        if raw.startswith("RGBa;16"):  # colours were multiplied by their opacity
            for part in _parts(numbers):
                plain = part[..., :3] * 65535.0 / part[..., 3:].clip(1)
                part[..., :3] = plain.clip(0, 65535)
        if image.mode != "F" and depth in (8, 32):  # Pillow takes them for uint8 and int32
            numbers = numbers.view(f"{'i' if signed else 'u'}{depth // 8}")
        if (clear := image.info.get("transparency")) is None:
            return numbers
        levels = numbers.reshape(*numbers.shape[:2], -1)
        opaque = (levels != clear).any(axis=-1, keepdims=True)
        return np.concatenate([levels, opaque * np.uint16(2**16 - 1)], axis=-1)

    # The MPO file of a phone is one picture with a brightness map, or a view for the other eye.
    has_frames = getattr(image, "is_animated", False) and image.format != "MPO"
    inverted = deep and tags.get(PHOTOMETRIC) == 0  # at 8 bits Pillow inverts it
    bits = None if signed or image.mode == "F" else depth
    # A tile may be larger than its image, and is decoded completely.
    tile_tags = (TILE_WIDTH, TILE_HEIGHT, CHANNELS, BITS)
    tile = math.prod(int(np.max(tags.get(x, 0))) for x in tile_tags) // 4
    size = image.height, image.width
    return _Opened(size, bits, read, has_frames, inverted, more_bytes=tile)


def _upright(image: Image.Image) -> Image.Image:
    """Returns the decoded image, turned as its EXIF says.

    A damaged EXIF is ignored.
    """
    image.load()
    turn = None
    with contextlib.suppress(Exception):
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(Image.Transpose(turn))


def _both_bytes(stream: BinaryIO, raw: str) -> np.ndarray:
    """Colours of 16 bits, read twice: Pillow keeps the upper byte, or the lower if told so."""

    def read(order: str) -> np.ndarray:
        stream.seek(0)
        image: Any = Image.open(stream, formats=FORMATS)
        for i, tile in enumerate(image.tile):
            more = tile.args[1:] if isinstance(tile.args, tuple) else ()
            image.tile[i] = tile._replace(args=(order, *more))
        return np.asarray(_upright(image))

    if raw == "LA;16B":
        return read("RGBA").view(">u2")
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[raw[-1]]
    raw = raw.replace("a", "A")
    return read(raw).astype(np.uint16) << 8 | read(raw[:-1] + other)


def _to_srgb(image: Image.Image, background: str) -> Image.Image:
    """Converts an image of 8 bits from its colour profile to sRGB, on the background."""
    profile = image.info.get("icc_profile")
    image = image.convert("LA") if image.mode == "La" else image
    if image.has_transparency_data:
        below = Image.new("RGBA", image.size, background)
        below.alpha_composite(image.convert("RGBA"))
        image = below.convert("RGB")
    if profile and image.mode in ("CMYK", "RGB"):
        with contextlib.suppress(ImageCms.PyCMSError, OSError):
            screen, source = ImageCms.createProfile("sRGB"), io.BytesIO(profile)
            image = ImageCms.profileToProfile(image, source, screen, outputMode="RGB") or image
    return image.convert("RGB")


def _scale(numbers: np.ndarray, bits: int | None, window: tuple[float, float] | None) -> np.ndarray:
    """Returns numbers in 8 bits: `255 (x - low) / (high - low)`, clipped.

    Without a window, it takes the upper byte. The last of two or four channels is opacity, which
    has no window. NaN becomes black.
    """
    if numbers.shape[2:] in ((2,), (4,)):
        parts = [(numbers[..., :-1], window), (numbers[..., -1:], None)]
        return np.concatenate([_scale(x, bits, limits) for x, limits in parts], axis=-1)
    if bits and (window is None or bits <= 8):
        eight = numbers >> (bits - 8) if bits >= 8 else numbers * 255.0 / (2**bits - 1)
        return np.minimum(eight, 255).astype(np.uint8)
    if window is None:
        raise InputError("there is no window for signed or floating-point numbers")
    scaled = np.empty(numbers.shape, np.uint8)
    for part, result in zip(_parts(numbers), _parts(scaled), strict=True):
        unit = (part.astype(np.float64) - window[0]) / (window[1] - window[0])
        result[:] = np.rint(255 * np.nan_to_num(np.clip(unit, 0, 1)))
    return scaled


def _parts(numbers: np.ndarray) -> list[np.ndarray]:
    """The rows of an image in parts, small enough to be computed in float64."""
    return np.array_split(numbers, 1 + numbers.size // 2**18)


def _array(numbers: np.ndarray) -> _Opened:
    """An array `[height, width]` or `[height, width, channels]` with 1, 3 or 4 channels."""
    is_image = numbers.ndim == 2 or (numbers.ndim == 3 and numbers.shape[2] in (1, 3, 4))
    if not is_image or numbers.dtype.kind not in "biuf":
        kind = f"{numbers.dtype} {numbers.shape}"
        raise InputError(f"{kind} is not an image [height, width, channels]")
    height, width = numbers.shape[:2]
    bits = {"b": 1, "u": 8 * numbers.itemsize}.get(numbers.dtype.kind)
    pixel_bytes = max(PIXEL_BYTES, 8 * numbers.itemsize * math.prod(numbers.shape[2:]))
    read = lambda: np.asarray(numbers)  # noqa: E731
    return _Opened((height, width), bits, read, pixel_bytes=pixel_bytes)


def _nifti(file: Path) -> _Opened:
    """The middle slice of a volume whose axes lead to the right, the front and the top (RAS+).

    The first of them is the rows, and the slice is taken along the last. Only the header is parsed:
    the extensions behind it could declare any size.
    """
    with needs("nifti"):
        import nibabel
    with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
        head = stream.read(540)
    is_second = 540 in struct.unpack("<i", head[:4]) + struct.unpack(">i", head[:4])
    kind = nibabel.Nifti2Header if is_second else nibabel.Nifti1Header
    header: Any = kind(head[: kind.sizeof_hdr])
    if not 0 <= (offset := header.get_data_offset()) <= NIFTI_BEGINNING:
        raise InputError(f"{offset:,} bytes before its numbers; at most {NIFTI_BEGINNING:,}")
    stored: Any = nibabel.arrayproxy.ArrayProxy(str(file), header)
    shape = stored.shape
    if len(shape) < 2 or math.prod(shape[3:]) > 1 or math.prod(shape) > 2**30:
        raise InputError(f"shape {shape}, not two or three axes of at most {2**30:,} voxels")
    axes = _nifti_axes(header, shape)
    (rows, _), (columns, _), *through = axes or [(k, False) for k in range(len(shape))]
    index: list[Any] = [slice(None)] * len(shape)
    for axis, is_flipped in through:
        middle = shape[axis] // 2
        index[axis] = shape[axis] - 1 - middle if is_flipped else middle
    plain = (stored.slope, stored.inter) == (1, 0)
    opened = _array(np.empty((0, 0), stored.dtype if plain else np.float64))
    pixel_bytes = PIXEL_BYTES + 8 * stored.dtype.itemsize
    # A slice across the stored order may be read with all that lies between its numbers.
    volume = 0 if {rows, columns} == {0, 1} else 2 * math.prod(shape) * stored.dtype.itemsize

    def read() -> np.ndarray:
        image = np.asarray(stored[tuple(index)])
        image = image.T if rows > columns else image
        steps = (-1 if is_flipped else 1 for _, is_flipped in axes[:2])
        return image[tuple(slice(None, None, x) for x in steps)]

    return opened._replace(
        size=(shape[rows], shape[columns]), read=read, pixel_bytes=pixel_bytes, more_bytes=volume,
        is_unoriented=not axes,
    )  # fmt: skip


def _nifti_axes(header: Any, shape: tuple[int, ...]) -> list[tuple[int, bool]]:
    """The stored axes in the order right, front, top, each with whether it leads the other way.

    Axes of one voxel come last, so a file of one slice is that slice. [] if neither a qform nor a
    sform says where the axes lead.
    """
    import nibabel

    affine = header.get_sform(coded=True)[0]
    affine = header.get_qform(coded=True)[0] if affine is None else affine
    if affine is None:
        return []
    if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
        raise InputError("its affine (sform or qform) leads the axes nowhere; save it anew")
    target, sign = nibabel.orientations.io_orientation(affine).T
    sizes = (*shape[:3], 1)[:3]
    ordered = sorted(range(3), key=lambda k: (sizes[k] == 1, target[k]))
    others = [(k, False) for k in range(3, len(shape))]
    return [(k, bool(sign[k] < 0)) for k in ordered if k < len(shape)] + others


def _dicom_header(stream: BinaryIO, tags: list[Any] | None = None) -> Any:
    """All tags of a DICOM file, or those named, without its pixels."""
    with needs("dicom"):
        import pydicom
    pydicom.config.logger.setLevel(logging.CRITICAL + 1)  # `_one_line` reports its errors
    meta = pydicom.filereader.read_file_meta_info(stream.name)
    if meta.get("TransferSyntaxUID") == pydicom.uid.DeflatedExplicitVRLittleEndian:
        raise InputError("a deflated DICOM file, whose size is unknown; save it uncompressed")
    return pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=tags)


def _dicom(stream: BinaryIO, window: tuple[float, float] | None) -> _Opened:
    """Opens a DICOM image in units of its modality.

    Without `window`, the image is as its own window (VOI) shows it.
    """
    header = _dicom_header(stream)
    import pydicom
    from pydicom import pixels

    kind, voi = header.PhotometricInterpretation, header.get("VOILUTSequence")
    if (frames := int(header.get("NumberOfFrames") or 1)) > 1:
        raise InputError(f"has {frames} frames; only DICOM files with one frame are read")
    has_voi = voi or not {"None", ""} & {str(header.get(f"Window{x}")) for x in ("Center", "Width")}
    rescale = (header.get("RescaleSlope") or 1, header.get("RescaleIntercept") or 0)
    plain = rescale == (1, 0) and not header.get("ModalityLUTSequence")
    bits = header.get("BitsStored") if plain and not header.get("PixelRepresentation") else None
    use_voi = kind.startswith("MONO") and window is None and bool(has_voi)
    syntax = header.file_meta.get("TransferSyntaxUID")
    if syntax and syntax.is_compressed:
        _check_decoder(syntax)
    # Most memory for the file: run lengths may grow by 64, the others are copied.
    file_bytes = Path(stream.name).stat().st_size
    file_bytes *= 64 if syntax == pydicom.uid.RLELossless else 4
    values = int(header.get("SamplesPerPixel") or 1) * int(header.BitsAllocated) // 8

    def read() -> np.ndarray:
        stream.seek(0)
        data = pydicom.dcmread(stream)
        if syntax and syntax.is_compressed:
            frame = next(pydicom.encaps.generate_frames(data.PixelData, number_of_frames=1))
            declared = _size_of(frame) or (data.Rows, data.Columns)
            if declared != (data.Rows, data.Columns):
                raise InputError(f"{declared} pixels in a file of {data.Rows} × {data.Columns}")
        try:
            numbers = data.pixel_array
        except RuntimeError as error:  # lists each decoder and its error
            why = str(error).rpartition(": ")[2]
            raise InputError(f"{why}; damaged or cut short {syntax.name}") from None
        if kind == "PALETTE COLOR":
            numbers = pixels.apply_color_lut(numbers, data)
            return _scale(numbers, 8 * numbers.itemsize, None)
        if not kind.startswith("MONO"):
            return numbers
        numbers = numbers if plain else pixels.apply_modality_lut(numbers, data)
        if not use_voi:
            return numbers
        if voi:
            viewed = pixels.apply_voi_lut(np.rint(numbers).astype(np.int64), data)
            return _scale(viewed, voi[0].LUTDescriptor[2], None)
        low, high = pixels.apply_voi_lut(np.array([-1e9, 1e9]), data)
        return _scale(pixels.apply_voi_lut(numbers, data), None, (low, high))

    read_bits = 8 if use_voi or kind == "PALETTE COLOR" else bits
    size, pixel_bytes = (header.Rows, header.Columns), PIXEL_BYTES + 16 * max(2, values)
    inverted = kind == "MONOCHROME1"
    return _Opened(size, read_bits, read, False, inverted, pixel_bytes, file_bytes)


def _check_decoder(syntax: Any) -> None:
    """InputError, with a remedy, for a DICOM compression that no installed package decodes."""
    from pydicom import pixels

    kind = f"compressed as {syntax.name} ({syntax})"
    try:
        decoder = pixels.get_decoder(syntax)
    except NotImplementedError:
        raise InputError(f"{kind}, which is not read; save it uncompressed") from None
    if not decoder.is_available:
        needs_gdcm = "gdcm" in str(decoder.missing_dependencies)
        package = "python-gdcm" if needs_gdcm else "pylibjpeg pylibjpeg-openjpeg"
        remedy = f"pip install {package}, or save it uncompressed"
        raise InputError(f"{kind}, which no installed package decodes; {remedy}")


def _size_of(frame: bytes) -> tuple[int, int] | None:
    """Returns height and width in the header of a JPEG, JPEG-LS or JPEG 2000.

    The decoder of the frame obeys them.
    """
    if frame.startswith(b"\xff\x4f\xff\x51"):
        right, bottom, left, top = struct.unpack(">4I", frame[8:24])
        return bottom - top, right - left
    at = 2 if frame.startswith(b"\xff\xd8") else len(frame)
    while frame[at : at + 1] == b"\xff":
        marker = frame[at + 1]
        if marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            height, width = struct.unpack(">HH", frame[at + 5 : at + 9])
            return height, width
        at += 1 if marker == 0xFF else 2 + int.from_bytes(frame[at + 2 : at + 4])
    return None
