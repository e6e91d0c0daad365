"""A folder of images as people have them: several sizes, formats and depths, and some damaged.

python -m examples.own_images.generate photographs
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("disc", "square", "triangle")
DAMAGED = 5


def write(folder: Path, num: int = 3000) -> None:
    """Writes so many images, three of a person, and `labels.csv`: file, label, person."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(num):
        label = int(rng.integers(len(CLASSES)))
        image = _shape(CLASSES[label], int(rng.integers(24, 120)), rng)
        kind = number % 5
        if kind == 0:  # 16 bits of grey
            grey = np.asarray(image.convert("L")).astype(np.uint16)
            image = Image.fromarray(257 * grey)
        modes = {1: "L", 2: "RGBA"}
        image = image.convert(modes[kind]) if kind in modes else image
        name = f"{number:04d}.{('png', 'tif', 'png', 'webp', 'jpg')[kind]}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
        rows.append([name, CLASSES[label], f"person{number // 3:04d}"])
    for name, *_ in rows[7 :: max(1, num // DAMAGED)]:
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "label", "person"], *rows])


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
    write(Path(sys.argv[1]))
