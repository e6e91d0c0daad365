"""Draws images of eight kinds without a photograph, each with the factors that made it.

python -m scripts.study.drawn --out=runs/study/drawn --images=60000 --seed=0

Pixels are uint8 `[n, 40, 40, 3]`; `factors` `[n, 9]` float32 has the kind's number and eight numbers
near 0 with deviation about 1, NaN where a kind has none: scale, roughness, cos and sin of twice the
orientation, row, column, colourfulness, softness.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from absl import flags

from bam.cli import console

_OUT = flags.DEFINE_string("out", "", "path without extension: _images.npy and _factors.npy")
_IMAGES = flags.DEFINE_integer("images", 60_000, "number of images", 1)
_SEED = flags.DEFINE_integer("seed", 0, "seed")
_SHEET = flags.DEFINE_string("sheet", "", "PNG of four images of each kind; '': none")

SIDE = 40
Y, X = np.mgrid[:SIDE, :SIDE].astype(np.float32)
NONE = np.nan
Rng = np.random.Generator
# An image, and scale, roughness, angle, row, column.
Drawn = tuple[np.ndarray, tuple[float, float, float, float, float]]


def texture(rng: Rng, slope: float, angle: float = 0.0, stretch: float = 1.0) -> np.ndarray:
    """A Gaussian field, deviation 1, amplitudes |frequency|^-slope; stretched along an angle."""
    rows, columns = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None]
    along = np.cos(angle) * columns + np.sin(angle) * rows
    across = np.cos(angle) * rows - np.sin(angle) * columns
    frequency = np.hypot(along * stretch, across / stretch)
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(SIDE, SIDE))) * frequency**-slope)
    return field / (field.std() + 1e-9)


def colour(rng: Rng, spread: float) -> np.ndarray:
    """A grey level from 0 to 1, plus a small random colour with mean 0."""
    tint = spread * rng.normal(size=3)
    return rng.uniform(0, 1) + tint - tint.mean()


def shape(
    rng: Rng, radius: float, row: float, column: float, angle: float
) -> tuple[np.ndarray, ...]:
    """A mask of a random outline, and the turned coordinates within it."""
    aspect = rng.uniform(0.4, 1)
    u = np.cos(angle) * (X - column) + np.sin(angle) * (Y - row)
    v = (np.cos(angle) * (Y - row) - np.sin(angle) * (X - column)) / aspect
    polar, lobes = np.arctan2(v, u), rng.integers(2, 7)
    wavy = radius * (1 + rng.uniform(0.1, 0.5) * np.cos(lobes * polar))
    masks = (
        u**2 + v**2 < radius**2,
        np.maximum(abs(u), abs(v)) < radius,
        (v > -radius / 2) & (v < radius - 2 * abs(u)),
        np.hypot(u, v) < wavy,
        (abs(np.hypot(u, v) - 0.75 * radius) < 0.25 * radius),
    )
    return masks[rng.integers(len(masks))], u, v


def leaves(rng: Rng, spread: float, fill: Callable[..., np.ndarray] | None = None) -> Drawn:
    """Shapes that cover one another until nothing is bare; radii are Pareto."""
    image, bare = np.zeros((SIDE, SIDE, 3), np.float32), np.ones((SIDE, SIDE), bool)
    least = np.exp(rng.uniform(np.log(1), np.log(5)))
    while bare.any():
        radius = min(SIDE, least + 1.5 * rng.pareto(1.5))
        row, column = rng.uniform(-radius / 2, SIDE + radius / 2, 2)
        mask, u, v = shape(rng, radius, row, column, rng.uniform(0, np.pi))
        new = bare & mask
        shade = 0.06 * u[new, None] / (radius + 1) * rng.normal(size=3)
        image[new] = colour(rng, spread) + shade
        if fill is not None and new.sum() > 20:
            image[new] += fill(rng, u, v)[new, None] * rng.uniform(0.02, 0.15)
        bare &= ~new
    return image, (np.log(least) - 0.8, NONE, NONE, NONE, NONE)


def stripes(rng: Rng, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A pattern in a shape's own coordinates: waves, checks or a field."""
    wave = np.sin(u * rng.uniform(0.5, 2.5)), np.sin(v * rng.uniform(0.5, 2.5))
    kind = rng.integers(3)
    return (wave[0], np.sign(wave[0] * wave[1]), texture(rng, rng.uniform(0.5, 1.6)))[kind]


def field(rng: Rng, spread: float) -> Drawn:
    """Random phases with the spectrum of photographs, stretched along an orientation."""
    slope, angle, stretch = rng.uniform(0.6, 2), rng.uniform(0, np.pi), rng.uniform(1, 3)
    grey = texture(rng, slope, angle, stretch)
    colours = np.stack([texture(rng, slope + 0.3, angle, stretch) for _ in range(3)], axis=-1)
    image = rng.uniform(0.3, 0.7) + 0.2 * grey[..., None] + spread * colours
    if rng.random() < 0.4:  # with edges: two levels of a second field
        edge = texture(rng, slope + 0.7, angle, stretch) > rng.normal() * 0.5
        image = np.where(edge[..., None], image, 1 - image + colour(rng, spread) / 3)
    return image, ((stretch - 2) / 0.6, (slope - 1.3) / 0.4, angle, NONE, NONE)


def waves(rng: Rng, spread: float) -> Drawn:
    """Sums of plane waves or rings, with a warp."""
    angle, period = rng.uniform(0, np.pi), np.exp(rng.uniform(np.log(3), np.log(20)))
    warp, bend = rng.uniform(0, 4), np.stack([texture(rng, 1.8), texture(rng, 1.8)])
    x, y = X + warp * bend[0], Y + warp * bend[1]
    row, column = rng.uniform(0, SIDE, 2)
    along = np.cos(angle) * x + np.sin(angle) * y
    rings = rng.random() < 0.3
    phase = (np.hypot(x - column, y - row) if rings else along) * 2 * np.pi / period
    second = np.sin(phase * rng.uniform(0.5, 2.5) + rng.uniform(0, 6)) * rng.uniform(0, 0.6)
    wave = np.sin(phase) + second
    wave = np.tanh(wave * rng.uniform(0.5, 6))
    low, high = colour(rng, spread), colour(rng, spread)
    image = low + (high - low) * (wave[..., None] + 1) / 2
    return image, (
        (np.log(period) - 2) / 0.5,
        (warp - 2) / 1.2,
        NONE if rings else angle,
        NONE,
        NONE,
    )


def program(rng: Rng, spread: float) -> Drawn:
    """A random small program: functions of the coordinates, combined several times."""
    scale = np.exp(rng.uniform(np.log(0.06), np.log(0.4)))
    values = [
        (X - SIDE / 2) * scale,
        (Y - SIDE / 2) * scale,
        np.hypot(X - rng.uniform(0, SIDE), Y - rng.uniform(0, SIDE)) * scale,
        texture(rng, 1.5),
    ]
    for _ in range(rng.integers(4, 9)):
        a, b = (values[rng.integers(len(values))] for _ in range(2))
        operations = (
            lambda: np.sin(a * rng.uniform(0.5, 3) + b), lambda: a * b / (1 + abs(b)), lambda: np.maximum(a, b),
            lambda: abs(a - b), lambda: np.tanh(2 * a - b), lambda: np.where(a > b, a, -b), lambda: np.mod(a + b, 1.5),
        )  # fmt: skip
        values.append(operations[rng.integers(len(operations))]())
    planes = np.stack([values[-1 - k] for k in range(3)], axis=-1)
    planes = (planes - planes.mean((0, 1))) / (planes.std((0, 1)) + 1e-3)
    mix = np.full((3, 3), 0.12) * rng.normal(size=3)[:, None] + spread * rng.normal(size=(3, 3))
    return rng.uniform(0.3, 0.7) + planes @ mix, (
        (np.log(scale) + 1.9) / 0.5,
        NONE,
        NONE,
        NONE,
        NONE,
    )


def solid(rng: Rng, spread: float, behind: np.ndarray | None = None) -> Drawn:
    """One to three balls, boxes or cylinders with light from a side, and a shadow, on a ground."""
    image = behind if behind is not None else field(rng, spread)[0] * 0.5 + colour(rng, spread) / 2
    light = rng.normal(size=3)
    light = np.array([light[0], light[1], abs(light[2]) + 0.5])
    light /= np.linalg.norm(light)
    angle = radius = row = column = 0.0
    for _ in range(rng.integers(1, 4)):
        radius, angle = np.exp(rng.uniform(np.log(4), np.log(16))), rng.uniform(0, np.pi)
        row, column = rng.uniform(6, SIDE - 6, 2)
        aspect = rng.uniform(0.4, 1)
        u = (np.cos(angle) * (X - column) + np.sin(angle) * (Y - row)) / radius
        v = (np.cos(angle) * (Y - row) - np.sin(angle) * (X - column)) / (radius * aspect)
        kind = rng.integers(3)
        inside = (
            u**2 + v**2 < 1,
            np.maximum(abs(u), abs(v)) < 0.8,
            (abs(u) < 0.9) & (abs(v) < 0.7),
        )[kind]
        depth = (
            np.sqrt(np.maximum(1 - u**2 - v**2, 0.02)),
            np.ones_like(u),
            np.sqrt(np.maximum(1 - v**2, 0.02)),
        )
        across = (u, np.where(abs(u) > abs(v), np.sign(u), 0) * 0.7, 0 * u)[kind]
        down = (v, np.where(abs(v) >= abs(u), np.sign(v), 0) * 0.7, v)[kind]
        shadow = np.roll(inside, (int(-4 * light[1]), int(-4 * light[0])), (0, 1)) & ~inside
        image = np.where(shadow[..., None], image * rng.uniform(0.5, 0.9), image)
        shading = np.maximum(light[0] * across + light[1] * down + light[2] * depth[kind], 0)
        skin = 1 + rng.uniform(0, 0.4) * stripes(rng, 4 * u, 4 * v) * (rng.random() < 0.5)
        lit = (0.25 + 0.75 * shading)[..., None] * skin[..., None] * colour(rng, spread)
        image = np.where(
            inside[..., None], lit + rng.uniform(0, 0.3) * shading[..., None] ** 8, image
        )
    place = (row / SIDE - 0.5) / 0.2, (column / SIDE - 0.5) / 0.2
    return image, ((np.log(radius) - 2.1) / 0.4, NONE, angle, *place)


def composed(rng: Rng, spread: float) -> Drawn:
    """Two images of other kinds, one seen through a shape or a field of the other."""
    first, second = (SIMPLE[rng.integers(len(SIMPLE))](rng, spread)[0] for _ in range(2))
    radius, (row, column) = rng.uniform(6, 18), rng.uniform(8, SIDE - 8, 2)
    angle = rng.uniform(0, np.pi)
    if rng.random() < 0.6:
        mask = shape(rng, radius, row, column, angle)[0]
        place = (row / SIDE - 0.5) / 0.2, (column / SIDE - 0.5) / 0.2
        return np.where(mask[..., None], first, second), ((radius - 12) / 3.5, NONE, angle, *place)
    mask = texture(rng, rng.uniform(1.4, 2.4)) > rng.normal() * 0.3
    return np.where(mask[..., None], first, second), (NONE,) * 5


def scene(rng: Rng, spread: float) -> Drawn:
    """Solids before a sky and a ground that meet at a horizon."""
    horizon = rng.uniform(0.2, 0.8) * SIDE + 2 * texture(rng, 2.0)[0]
    sky = colour(rng, spread) + (Y / SIDE * rng.uniform(-0.4, 0.4))[..., None]
    sky = sky + rng.uniform(0, 0.15) * texture(rng, 1.8, 0, 2)[..., None]
    ground = (
        colour(rng, spread)
        + rng.uniform(0, 0.2) * texture(rng, rng.uniform(0.6, 1.5), 0, rng.uniform(1, 3))[..., None]
    )
    return solid(rng, spread, np.where((Y > horizon)[..., None], ground, sky))


SIMPLE = (leaves, functools.partial(leaves, fill=stripes), field, waves, program)
KINDS = {
    "leaves": leaves, "textured leaves": SIMPLE[1], "fields": field, "waves": waves,
    "programs": program, "solids": solid, "compositions": composed, "scenes": scene,
}  # fmt: skip


def draw(rng: Rng, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """An image of a kind and its factors."""
    spread, soft = rng.uniform(0, 0.25), rng.uniform(0, 1)
    image, (scale, roughness, angle, row, column) = list(KINDS.values())[kind](rng, spread)
    image = image + rng.uniform(0, 0.06) * texture(rng, rng.uniform(0, 1.2))[..., None]
    for axis in (0, 1):
        beside = np.roll(image, 1, axis) + np.roll(image, -1, axis)
        image = (1 - soft / 2) * image + soft / 4 * beside
    low, high = np.quantile(image, (0.02, 0.98))
    if rng.random() < 0.5:  # the whole range of grey levels
        image = (image - low) / (high - low + 1e-3)
    factors = [
        kind,
        scale,
        roughness,
        np.cos(2 * angle),
        np.sin(2 * angle),
        row,
        column,
        (spread - 0.125) * 14,
        (soft - 0.5) * 3.5,
    ]
    return (255 * np.clip(image, 0, 1)).astype(np.uint8), np.array(factors, np.float32)


def many(seed: int, first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Images `first` to `first + number` of a seed; each has a stream of its own."""
    each = [
        draw(np.random.default_rng((seed, k)), k % len(KINDS)) for k in range(first, first + number)
    ]
    images, factors = zip(*each, strict=True)
    return np.stack(images), np.stack(factors)


def main() -> None:
    """Writes images and factors."""
    starts = list(range(0, _IMAGES.value, 500))
    with ProcessPoolExecutor(2) as pool:
        parts = list(pool.map(many, [_SEED.value] * len(starts), starts, [500] * len(starts)))
    out = Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    images, factors = (np.concatenate(x)[: _IMAGES.value] for x in zip(*parts, strict=True))
    np.save(f"{out}_images.npy", images)
    np.save(f"{out}_factors.npy", factors)
    if _SHEET.value:
        from PIL import Image

        rows = [np.concatenate([images[k + 8 * j] for j in range(8)], axis=1) for k in range(8)]
        sheet = Image.fromarray(np.concatenate(rows))
        sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(
            _SHEET.value
        )


if __name__ == "__main__":
    console.require("out")
    console.run(main)
