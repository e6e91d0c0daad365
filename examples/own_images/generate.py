"""Generates untidy images: a folder of many formats, a downloaded archive, a clinic's scans.

python -m examples.own_images.generate photographs [shapes.zip scans]
"""

import csv
import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from bam import waits
from bam.cli import screen
from bam.extras import needs

CLASSES = ("disc", "square", "triangle")
DAMAGED = 5
SUFFIXES = ("png", "tif", "png", "webp", "jpg", "jpg", "jpg", "gif", "png", "npy")


def write(folder: Path, num: int = 3000) -> None:
    """Writes a new folder of `num` images, three of each person, and `labels.csv` with both.

    The table has the format of a spreadsheet program on Windows. Two persons have the same picture,
    and there is a folder of system files, as some archives leave it.
    """
    if folder.exists():  # what is there stays as it is
        return
    rng = np.random.default_rng(0)
    rows = []
    for number in range(num):
        label = int(rng.integers(len(CLASSES)))
        image = _shape(CLASSES[label], int(rng.integers(24, 120)), rng)
        kind = number % 10
        name = f"{number:04d}.{SUFFIXES[kind]}"
        folder.mkdir(parents=True, exist_ok=True)
        _save(image, kind, folder / name)
        rows.append([name, CLASSES[label], f"person{number // 3:04d}"])
    (folder / rows[13][0]).write_bytes((folder / rows[3][0]).read_bytes())
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "._0000.png").write_bytes(b"no image")
    for name, *_ in rows[7 :: num // DAMAGED + 1]:
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=";").writerows([["file", "label", "person"], *rows])


def write_archive(archive: Path, num: int = 600) -> None:
    """Writes a zip in the layout of Hugging Face's `imagefolder`.

    train/ and test/ have a `metadata.jsonl` each, which leaves out every hundredth image. One file
    is a server's error page in place of an image, and there is a system file.
    """
    rng = np.random.default_rng(1)
    rows: dict[str, list[str]] = {"train": [], "test": []}
    with zipfile.ZipFile(archive, "w") as packed:
        for number in range(num):
            label, split = (
                CLASSES[int(rng.integers(3))],
                "test" if number // 2 % 5 == 0 else "train",
            )
            content = io.BytesIO()
            _shape(label, int(rng.integers(24, 64)), rng).save(content, "PNG")
            name = f"{number:04d}.png"
            page = b"<!DOCTYPE html><title>404 Not Found</title>"
            packed.writestr(f"shapes/{split}/{name}", page if number == 7 else content.getvalue())
            row = {"file_name": name, "shape": label, "author": number // 2}
            rows[split] += [json.dumps(row)] if number % 100 != 99 else []
        for split, lines in rows.items():
            packed.writestr(f"shapes/{split}/metadata.jsonl", "\n".join(lines))
        packed.writestr("shapes/README.md", "# Shapes")
        packed.writestr("__MACOSX/shapes/train/._0001.png", b"no image")


def write_scans(folder: Path, num: int = 900) -> None:
    """Writes 12-bit DICOM files, two of each patient, and `weights.csv` with decimal commas.

    The area of a bright disc is proportional to the weight in kilograms. One file in 300 is cut.
    """
    with needs("dicom"):
        import pydicom
    rng = np.random.default_rng(2)
    folder.mkdir(parents=True)
    rows = [["file", "kg"]]
    y, x = np.mgrid[-1:1:40j, -1:1:48j]
    for number in range(num):
        kilograms = rng.uniform(50, 110)
        is_inside = np.hypot(y - rng.uniform(-0.2, 0.2), x) < 0.08 * np.sqrt(kilograms)
        numbers = np.where(is_inside, 2600, 700) + rng.normal(0, 150, is_inside.shape)
        scan = pydicom.Dataset()
        scan.file_meta = pydicom.dataset.FileMetaDataset()
        scan.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        scan.SOPClassUID = scan.SOPInstanceUID = pydicom.uid.CTImageStorage
        scan.PatientID, scan.PatientName = f"P{number // 2:04d}", "Doe^Jane"
        scan.Rows, scan.Columns = numbers.shape
        scan.SamplesPerPixel, scan.PhotometricInterpretation = 1, "MONOCHROME2"
        scan.BitsAllocated, scan.BitsStored, scan.HighBit = 16, 12, 11
        scan.PixelRepresentation = 0
        scan.PixelData = np.clip(numbers, 0, 4095).astype("<u2").tobytes()
        path = folder / f"{number:04d}.dcm"
        scan.save_as(path, enforce_file_format=True)
        if number % 300 == 150:
            path.write_bytes(path.read_bytes()[:2000])
        rows.append([path.name, f"{kilograms:.1f}".replace(".", ",")])
    with (folder / "weights.csv").open("w", newline="", encoding="cp1252") as file:
        csv.writer(file, delimiter=";").writerows(rows)


def _save(image: Image.Image, kind: int, path: Path) -> None:
    """Saves an image as `kind`: 16 or 8 bits, RGBA, rotated, CMYK, animated, palette or NumPy."""
    more = {}
    if kind == 0:
        image = Image.fromarray(257 * np.asarray(image.convert("L")).astype(np.uint16))
    elif kind == 5:  # rotated, with the EXIF tag that a camera writes
        image, more["exif"] = image.transpose(Image.Transpose.ROTATE_90), Image.Exif()
        more["exif"][274] = 6
    elif kind == 7:
        more = {"save_all": True, "append_images": [image.convert("L")]}
    image = image.convert({1: "L", 2: "RGBA", 6: "CMYK", 8: "P"}.get(kind, image.mode))
    np.save(path, np.asarray(image)) if kind == 9 else image.save(path, **more)


def _shape(name: str, height: int, rng: np.random.Generator) -> Image.Image:
    """A bright textured shape, a little rotated and off-centre, on a dark texture."""
    width = int(height * rng.uniform(0.8, 1.3))
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    y, x = y - rng.uniform(-0.1, 0.1), x * width / height - rng.uniform(-0.1, 0.1)
    turn, radius = rng.uniform(-0.3, 0.3), rng.uniform(0.5, 0.7)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    corners = {"square": 4, "triangle": 3}.get(name, 0)
    far = np.hypot(u, v)
    if corners:  # the distance to the nearest side
        angles = 2 * np.pi * np.arange(corners) / corners
        far = np.max([u * np.cos(a) + v * np.sin(a) for a in angles], axis=0)
        far = far * (1.25 if corners == 4 else 1.6)
    inside = (far < radius)[..., None]
    bright, dark = rng.uniform(150, 240, 3), rng.uniform(10, 90, 3)
    wave = 25 * np.sin(rng.uniform(8, 30) * x + rng.uniform(8, 30) * y)[..., None]
    pixels = np.where(inside, bright + wave, dark - wave)
    pixels = pixels + rng.normal(0, 12, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


if __name__ == "__main__":
    with waits.awaited(screen.show, "drawing 3,000 images"):
        for make, place in zip((write, write_archive, write_scans), sys.argv[1:], strict=False):
            make(Path(place))
