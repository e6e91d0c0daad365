"""Draws images without a photograph: dead leaves, and eight kinds with the factors that made them.

An image of the eight kinds has 40 × 40 pixels, so that a view of it can be a crop. A factor that
its kind does not have is NaN. Sources: Baradad et al. 2021, arXiv 2106.05963 (dead leaves, waves,
spectra); Baradad et al. 2022, arXiv 2211.16412 (small programs).
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, UInt8

SIDE = 40
# Numbers near 0 with a deviation of about 1; cos and sin are of twice the orientation.
FACTORS = ("scale", "roughness", "cos", "sin", "row", "column", "colourfulness", "softness")

Y, X = np.mgrid[:SIDE, :SIDE].astype(np.float32)
Rng = np.random.Generator
Image = Float[np.ndarray, "40 40 3"]
Plane = Float[np.ndarray, "s s"]
Fill = Callable[..., Plane] | None  # what a shape shows, from its turned coordinates
Drawn = tuple[Image, dict[str, float]]  # "angle" stands for cos and sin


def drawn_images(
    number: int, seed: int = 0
) -> tuple[UInt8[np.ndarray, "n 40 40 3"], Float[np.ndarray, "n 9"]]:
    """Images, of each kind in turn, and float32 rows of their kind's number and `FACTORS`.

    Image k depends on the seed and k alone. Four thousand take a minute.
    """
    each = [draw(np.random.default_rng((seed, k)), k % len(KINDS)) for k in range(number)]
    images, factors = zip(*each, strict=True)
    return np.stack(images), np.stack(factors)


def draw(rng: Rng, kind: int) -> tuple[UInt8[np.ndarray, "40 40 3"], Float[np.ndarray, "9"]]:
    """An image of a kind with noise, softened, and in half of all cases with full contrast."""
    spread, soft = rng.uniform(0, 0.25), rng.uniform(0, 1)
    image, known = KINDS[kind](rng, spread)
    image = image + rng.uniform(0, 0.06) * texture(rng, rng.uniform(0, 1.2))[..., None]
    image = soften(image, soft)
    low, high = np.quantile(image, (0.02, 0.98))
    if rng.random() < 0.5:
        image = (image - low) / (high - low + 1e-3)
    angle = known.get("angle", np.nan)
    known |= {"cos": np.cos(2 * angle), "sin": np.sin(2 * angle)}
    known |= {"colourfulness": (spread - 0.125) * 14, "softness": (soft - 0.5) * 3.5}
    factors = [kind, *(known.get(name, np.nan) for name in FACTORS)]
    return (255 * np.clip(image, 0, 1)).astype(np.uint8), np.array(factors, np.float32)


def dead_leaves(rng: Rng, side: int = 32) -> Float[np.ndarray, "s s 3"]:
    """Discs, bars and triangles that cover one another, with pixels in [0, 1]."""
    image = cover(rng, side, 1, 0.12, is_simple=True)
    image += rng.uniform(0, 0.1) * texture(rng, rng.uniform(0.8, 1.6), side=side)[..., None]
    return np.clip(soften(image, rng.uniform(0, 1)), 0, 1).astype(np.float32)


def cover(
    rng: Rng, side: int, least: float, spread: float, is_simple: bool = False, fill: Fill = None
) -> Float[np.ndarray, "s s 3"]:
    """Draws shapes that cover one another until nothing is bare.

    Radii are Pareto with a density of about r^-2.5 (Lee, Mumford and Huang 2001).
    """
    image, bare = np.zeros((side, side, 3), np.float32), np.ones((side, side), bool)
    y, x = np.mgrid[:side, :side]
    while bare.any():
        radius = min(side, least + 1.5 * rng.pareto(1.5))
        row, column = rng.uniform(-radius / 2, side + radius / 2, 2)
        mask, u, v = shape(rng, radius, x - column, y - row, rng.uniform(0, np.pi), is_simple)
        new = bare & mask
        shade = 0.06 * u[new, None] / (radius + 1) * rng.normal(size=3)
        image[new] = colour(rng, spread) + shade
        if fill is not None and new.sum() > 20:
            image[new] += fill(rng, u, v)[new, None] * rng.uniform(0.02, 0.15)
        bare &= ~new
    return image


def soften(image: Float[np.ndarray, "s s 3"], soft: float) -> Float[np.ndarray, "s s 3"]:
    """Returns the image with a share of each pixel from the pixels beside it."""
    for axis in (0, 1):
        beside = np.roll(image, 1, axis) + np.roll(image, -1, axis)
        image = (1 - soft / 2) * image + soft / 4 * beside
    return image


def texture(
    rng: Rng, slope: float, angle: float = 0.0, stretch: float = 1.0, side: int = SIDE
) -> Plane:
    """Draws a Gaussian field of deviation 1 with amplitudes |frequency|^-slope.

    The field is stretched along an angle.
    """
    rows, columns = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None]
    along, across = turn(columns, rows, angle)
    frequency = np.hypot(along * stretch, across / stretch)
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(side, side))) * frequency**-slope)
    return np.asarray(field / (field.std() + 1e-9))


def turn(x: Plane, y: Plane, angle: float, aspect: float = 1.0) -> tuple[Plane, Plane]:
    """Returns coordinates along an angle, and across it.

    The second are divided by `aspect`.
    """
    u = np.cos(angle) * x + np.sin(angle) * y
    return u, (np.cos(angle) * y - np.sin(angle) * x) / aspect


def colour(rng: Rng, spread: float) -> Float[np.ndarray, "3"]:
    """A grey level from 0 to 1, plus a small random colour with mean 0."""
    tint = spread * rng.normal(size=3)
    return np.asarray(rng.uniform(0, 1) + tint - tint.mean())


def place(row: float, column: float, angle: float) -> dict[str, float]:
    """The factors of a thing at a place."""
    return {"row": (row / SIDE - 0.5) / 0.2, "column": (column / SIDE - 0.5) / 0.2, "angle": angle}


def shape(
    rng: Rng, radius: float, x: Plane, y: Plane, angle: float, is_simple: bool = False
) -> tuple[Plane, ...]:
    """Draws a mask, and returns it with the turned coordinates.

    The mask is a disc, a bar or a triangle. If it is not simple, it can also be lobes or a ring.
    """
    u, v = turn(x, y, angle, rng.uniform(0.4, 1))
    disc, bar = u**2 + v**2 < radius**2, np.maximum(abs(u), abs(v)) < radius
    masks = [disc, bar, (v > -radius / 2) & (v < radius - 2 * abs(u))]
    if not is_simple:
        polar, lobes = np.arctan2(v, u), rng.integers(2, 7)
        wavy = radius * (1 + rng.uniform(0.1, 0.5) * np.cos(lobes * polar))
        ring = abs(np.hypot(u, v) - 0.75 * radius) < 0.25 * radius
        masks += [np.hypot(u, v) < wavy, ring]
    return masks[rng.integers(len(masks))], u, v


def pattern(rng: Rng, u: Plane, v: Plane) -> Plane:
    """Waves or checks in the coordinates of a shape, or a field."""
    wave = np.sin(u * rng.uniform(0.5, 2.5)), np.sin(v * rng.uniform(0.5, 2.5))
    kind = rng.integers(3)
    return (wave[0], np.sign(wave[0] * wave[1]), texture(rng, rng.uniform(0.5, 1.6)))[kind]


def leaves(rng: Rng, spread: float, fill: Fill = None) -> Drawn:
    """Shapes that cover one another."""
    least = np.exp(rng.uniform(np.log(1), np.log(5)))
    return cover(rng, SIDE, least, spread, fill=fill), {"scale": np.log(least) - 0.8}


def field(rng: Rng, spread: float) -> Drawn:
    """Random phases with a spectrum like that of photographs, stretched along an orientation."""
    slope, angle, stretch = rng.uniform(0.6, 2), rng.uniform(0, np.pi), rng.uniform(1, 3)
    grey = texture(rng, slope, angle, stretch)
    colours = np.stack([texture(rng, slope + 0.3, angle, stretch) for _ in range(3)], axis=-1)
    image = rng.uniform(0.3, 0.7) + 0.2 * grey[..., None] + spread * colours
    if rng.random() < 0.4:  # with edges: two levels of a second field
        edge = texture(rng, slope + 0.7, angle, stretch) > rng.normal() * 0.5
        image = np.where(edge[..., None], image, 1 - image + colour(rng, spread) / 3)
    known = {"scale": (stretch - 2) / 0.6, "roughness": (slope - 1.3) / 0.4, "angle": angle}
    return image, known


def waves(rng: Rng, spread: float) -> Drawn:
    """Sums of plane waves or rings, with a warp."""
    angle, period = rng.uniform(0, np.pi), np.exp(rng.uniform(np.log(3), np.log(20)))
    warp, bend = rng.uniform(0, 4), np.stack([texture(rng, 1.8), texture(rng, 1.8)])
    x, y = X + warp * bend[0], Y + warp * bend[1]
    row, column = rng.uniform(0, SIDE, 2)
    along, _ = turn(x, y, angle)
    rings = rng.random() < 0.3
    phase = (np.hypot(x - column, y - row) if rings else along) * 2 * np.pi / period
    second = np.sin(phase * rng.uniform(0.5, 2.5) + rng.uniform(0, 6)) * rng.uniform(0, 0.6)
    wave = np.tanh((np.sin(phase) + second) * rng.uniform(0.5, 6))
    low, high = colour(rng, spread), colour(rng, spread)
    known = {"scale": (np.log(period) - 2) / 0.5, "roughness": (warp - 2) / 1.2}
    image = low + (high - low) * (wave[..., None] + 1) / 2
    return image, known if rings else known | {"angle": angle}


def program(rng: Rng, spread: float) -> Drawn:
    """A random small program: functions of the coordinates, combined several times."""
    scale = np.exp(rng.uniform(np.log(0.06), np.log(0.4)))
    values = [(X - SIDE / 2) * scale, (Y - SIDE / 2) * scale]
    values += [np.hypot(X - rng.uniform(0, SIDE), Y - rng.uniform(0, SIDE)) * scale]
    values += [texture(rng, 1.5)]
    operations: tuple[Callable[[Plane, Plane], Plane], ...] = (
        lambda a, b: np.sin(a * rng.uniform(0.5, 3) + b),
        lambda a, b: a * b / (1 + abs(b)),
        np.maximum,
        lambda a, b: abs(a - b),
        lambda a, b: np.tanh(2 * a - b),
        lambda a, b: np.where(a > b, a, -b),
        lambda a, b: np.mod(a + b, 1.5),
    )
    for _ in range(rng.integers(4, 9)):
        a, b = (values[rng.integers(len(values))] for _ in range(2))
        values.append(operations[rng.integers(len(operations))](a, b))
    planes = np.stack([values[-1 - k] for k in range(3)], axis=-1)
    planes = (planes - planes.mean((0, 1))) / (planes.std((0, 1)) + 1e-3)
    mix = np.full((3, 3), 0.12) * rng.normal(size=3)[:, None] + spread * rng.normal(size=(3, 3))
    return rng.uniform(0.3, 0.7) + planes @ mix, {"scale": (np.log(scale) + 1.9) / 0.5}


def solids(rng: Rng, spread: float, behind: Image | None = None) -> Drawn:
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
        u, v = turn(X - column, Y - row, angle, radius * aspect)
        u = u / radius
        wide = abs(u) > abs(v)
        ball, box, cylinder = u**2 + v**2 < 1, np.maximum(abs(u), abs(v)) < 0.8, abs(u) < 0.9
        sides = (0.7 * np.sign(np.where(x, y, 0)) for x, y in ((wide, u), (~wide, v)))
        # The normal of each surface: across, down and towards the eye.
        inside, across, down, depth = (
            (ball, u, v, np.sqrt(np.maximum(1 - u**2 - v**2, 0.02))),
            (box, *sides, np.ones_like(u)),
            (cylinder & (abs(v) < 0.7), 0 * u, v, np.sqrt(np.maximum(1 - v**2, 0.02))),
        )[rng.integers(3)]
        shadow = np.roll(inside, (int(-4 * light[1]), int(-4 * light[0])), (0, 1)) & ~inside
        image = np.where(shadow[..., None], image * rng.uniform(0.5, 0.9), image)
        shading = np.maximum(light[0] * across + light[1] * down + light[2] * depth, 0)
        skin = 1 + rng.uniform(0, 0.4) * pattern(rng, 4 * u, 4 * v) * (rng.random() < 0.5)
        lit = (0.25 + 0.75 * shading)[..., None] * skin[..., None] * colour(rng, spread)
        glossy = lit + rng.uniform(0, 0.3) * shading[..., None] ** 8
        image = np.where(inside[..., None], glossy, image)
    return image, {"scale": (np.log(radius) - 2.1) / 0.4} | place(row, column, angle)


def composition(rng: Rng, spread: float) -> Drawn:
    """Two images of other kinds, one seen through a shape or a field of the other."""
    first, second = (SIMPLE[rng.integers(len(SIMPLE))](rng, spread)[0] for _ in range(2))
    radius, (row, column) = rng.uniform(6, 18), rng.uniform(8, SIDE - 8, 2)
    angle = rng.uniform(0, np.pi)
    if rng.random() < 0.6:
        mask = shape(rng, radius, X - column, Y - row, angle)[0]
        known = {"scale": (radius - 12) / 3.5} | place(row, column, angle)
    else:
        mask, known = texture(rng, rng.uniform(1.4, 2.4)) > rng.normal() * 0.3, {}
    return np.where(mask[..., None], first, second), known


def scene(rng: Rng, spread: float) -> Drawn:
    """Solids before a sky and a ground that meet at a horizon."""
    horizon = rng.uniform(0.2, 0.8) * SIDE + 2 * texture(rng, 2.0)[0]
    sky = colour(rng, spread) + (Y / SIDE * rng.uniform(-0.4, 0.4))[..., None]
    sky = sky + rng.uniform(0, 0.15) * texture(rng, 1.8, 0, 2)[..., None]
    rough = colour(rng, spread), rng.uniform(0, 0.2), rng.uniform(0.6, 1.5), rng.uniform(1, 3)
    ground = rough[0] + rough[1] * texture(rng, rough[2], 0, rough[3])[..., None]
    return solids(rng, spread, np.where((horizon < Y)[..., None], ground, sky))


SIMPLE = (leaves, functools.partial(leaves, fill=pattern), field, waves, program)
KINDS = (*SIMPLE, solids, composition, scene)  # by number
