"""A folder of images as people have them: of many sizes and formats, turned, copied, damaged.

python -m examples.own_images.generate photographs
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from bam import waits
from bam.cli import console

CLASSES = ("disc", "square", "triangle")
DAMAGED = 5
SUFFIXES = ("png", "tif", "png", "webp", "jpg", "jpg", "jpg", "gif", "png", "npy")


def write(folder: Path, num: int = 3000) -> None:
    """Writes so many images, three of a person, and `labels.csv`: file, label, person.

    The table is as a spreadsheet of Windows has it. Two persons have the same picture, and an
    archive left its files.
    """
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


def _save(image: Image.Image, kind: int, path: Path) -> None:
    """Grey of 16 and 8 bits, transparency, WebP, JPEG; turned, inks, animated, a palette, NumPy."""
    more = {}
    if kind == 0:
        image = Image.fromarray(257 * np.asarray(image.convert("L")).astype(np.uint16))
    elif kind == 5:  # lying, as a camera stores it, with the note that it must be turned
        image, more["exif"] = image.transpose(Image.Transpose.ROTATE_90), Image.Exif()
        more["exif"][274] = 6
    elif kind == 7:
        more = {"save_all": True, "append_images": [image.convert("L")]}
    image = image.convert({1: "L", 2: "RGBA", 6: "CMYK", 8: "P"}.get(kind, image.mode))
    np.save(path, np.asarray(image)) if kind == 9 else image.save(path, **more)


def _shape(name: str, height: int, rng: np.random.Generator) -> Image.Image:
    """A bright textured shape, a little turned and off the middle, on a dark texture."""
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
    with waits.awaited(console.show, "drawing 3,000 images"):
        write(Path(sys.argv[1]))
