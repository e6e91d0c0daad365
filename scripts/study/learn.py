"""Learns an encoder from drawn images, and maps CIFAR-10 or drawn images with it or with the prior.

python -m scripts.study.learn --drawn=runs/study/drawn --loss=both --steps=2068 --out=runs/study/both
python -m scripts.study.learn --drawn=runs/study/drawn --weights=runs/study/both \
  --data=FOLDER --out=runs/study/both

The encoder is bam's ResNet-9. "contrast" is NT-Xent of two views (Chen et al. 2020); "factors" is
cross-entropy of the kind and squared error of the factors that an image has; "both" is their sum.
The features are means over quarters, or sixteenths, of the activations of five depths, standardised
by their moments in drawn images.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from bam.cli import console
from bam.data import datasets
from bam.features import prior
from bam.models.layers import mish
from bam.models.resnet9 import ResNet9
from scripts.prior import whitening

_DRAWN = flags.DEFINE_string("drawn", "", "path without extension of drawn images and factors")
_LOSS = flags.DEFINE_enum(
    "loss", "both", ["contrast", "factors", "both"], "what the encoder learns"
)
_STEPS = flags.DEFINE_integer("steps", 2068, "steps to learn", 1)
_OUT = flags.DEFINE_string("out", "", "path without extension for weights, or for features")
_WEIGHTS = flags.DEFINE_string("weights", "", "weights to map with; 'prior': those of the package")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet, to map")
_WIDTH = flags.DEFINE_integer("width", 32, "width of ResNet-9", 1)
_VIEWS = flags.DEFINE_integer("views", 2, "2: means over image and mirror image; 1: image alone")
_BATCH = flags.DEFINE_integer("batch", 128, "images of a step", 1)

SIDE, KINDS, EMBEDDING, HEAT, RATE = 32, 8, 128, 0.2, 2e-3
DEPTHS = {"GroupNorm_1": 2, "GroupNorm_3": 2, "GroupNorm_4": 2, "GroupNorm_5": 2, "GroupNorm_7": 4}


def encoder():
    return ResNet9(EMBEDDING + KINDS + 8, width=_WIDTH.value)


def views(rng, images, jitter):
    """Crops of 32 × 32 pixels; with jitter, of other sizes and colours, half of them mirrored."""
    n, whole = len(images), images.shape[1]
    size = whole * np.sqrt(rng.uniform(0.25, 1, n)) if jitter else np.full(n, 36.0)
    steps = (np.arange(SIDE) + 0.5) / SIDE
    rows, columns = (
        rng.uniform(0, 1, (n, 1)) * (whole - size)[:, None] + steps * size[:, None] - 0.5
        for _ in range(2)
    )
    if jitter:
        columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    pixels, each = images.astype(np.float32) / 255, np.arange(n)
    for axis, place in ((1, rows), (2, columns)):  # linear interpolation along each axis
        low = np.clip(np.floor(place), 0, whole - 2).astype(int)
        part = np.clip(place - low, 0, 1).astype(np.float32)
        part = part[:, :, None, None] if axis == 1 else part[:, None, :, None]
        take = (
            (lambda k: pixels[each[:, None], k])
            if axis == 1
            else (lambda k: np.stack([x[:, i] for x, i in zip(pixels, k)]))
        )
        pixels = (1 - part) * take(low) + part * take(low + 1)
    if not jitter:
        return pixels
    draw = lambda low, high: rng.uniform(low, high, (n, 1, 1, 1)).astype(np.float32)
    grey = pixels.mean(-1, keepdims=True)
    saturation = np.where(rng.random((n, 1, 1, 1)) < 0.2, 0, draw(0.4, 1.6))
    shift = 0.1 * rng.normal(size=(n, 1, 1, 3)).astype(np.float32)
    changed = (grey + saturation * (pixels - grey) - 0.5) * draw(0.5, 1.5) + 0.5 + shift
    return np.clip(changed, 0, 1).astype(np.float32)


def contrast(one, two):
    """NT-Xent: each view finds the other view of its image among all others."""
    z = jnp.concatenate([one, two])
    z = z / (jnp.linalg.norm(z, axis=1, keepdims=True) + 1e-6)
    scores = z @ z.T / HEAT - 1e9 * jnp.eye(len(z))
    return optax.softmax_cross_entropy_with_integer_labels(
        scores, jnp.roll(jnp.arange(len(z)), len(one))
    ).mean()


def factor_loss(outputs, factors):
    kind = optax.softmax_cross_entropy_with_integer_labels(
        outputs[:, :KINDS], factors[:, 0].astype(int)
    )
    known = jnp.isfinite(factors[:, 1:])
    error = jnp.where(known, outputs[:, KINDS:] - jnp.nan_to_num(factors[:, 1:]), 0)
    return kind.mean() + jnp.sum(error**2) / jnp.sum(known)


def loss_of(params, pixels, factors):
    outputs, total, kind = encoder().apply(params, pixels - 0.5), 0.0, _LOSS.value
    if kind != "factors":
        total += contrast(*jnp.split(outputs[:, :EMBEDDING], 2))
    if kind != "contrast":
        total += factor_loss(outputs[:, EMBEDDING:], factors)
    return total


def learn():
    """Trains for the given time, with a rate that falls to zero, and keeps the weights."""
    images, factors = (np.load(f"{_DRAWN.value}_{x}.npy") for x in ("images", "factors"))
    params = encoder().init(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(1e-4)
    )
    state = tx.init(params)

    @jax.jit
    def step(params, state, pixels, factors, rate):
        loss, grads = jax.value_and_grad(loss_of)(params, pixels, factors)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, loss

    rng, number, losses = np.random.default_rng(0), 0, []
    started = time.monotonic()
    for _ in range(_STEPS.value):
        past = number / _STEPS.value
        rows = rng.choice(len(images), _BATCH.value, replace=False)
        rate = RATE * min(1, (number + 1) / 50) * np.cos(past * np.pi / 2) ** 2
        jitter = _LOSS.value != "factors"
        rows = np.concatenate([rows] * (1 + jitter))
        pixels = views(rng, images[rows], jitter)
        params, state, loss = step(params, state, pixels, factors[rows], rate)
        number += 1
        losses.append(float(loss))
        if number % 50 == 0:
            print(
                f"step {number}, loss {np.mean(losses[-50:]):.3f}, {past:.0%}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    leaves = {
        "/".join(k.key for k in path): np.asarray(x, np.float16)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    np.savez(f"{_OUT.value}.npz", steps=number, losses=losses, **leaves)


def activations(params, pixels):
    """Means over places of activations, one array for each depth, `[n, places · channels]`."""
    _, state = encoder().apply(
        params, pixels - 0.5, capture_intermediates=True, mutable=["intermediates"]
    )
    found = []
    for name, side in DEPTHS.items():
        x = mish(state["intermediates"][name]["__call__"][0])
        n, height, width, channels = x.shape
        x = x.reshape(n, side, height // side, side, width // side, channels).mean((2, 4))
        found.append(x.reshape(n, side * side, channels))
    return found


def mapped():
    """Keeps the features of CIFAR-10's training and test images, one file for each depth."""
    drawn = (
        np.load(f"{_DRAWN.value}_images.npy", mmap_mode="r")[:4000, 4:36, 4:36]
        if _DRAWN.value
        else None
    )
    if _WEIGHTS.value == "prior":
        whole = prior.prior()
        maps = {"": None}
        whitened = lambda x: [whole(x).reshape(len(x), -1)]
    else:
        kept = np.load(f"{_WEIGHTS.value}.npz")
        params = encoder().init(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.asarray(kept["/".join(k.key for k in path)], jnp.float32), params
        )

        def one(image):
            sides = jnp.stack([image, image[:, ::-1]][: _VIEWS.value])[:, None]
            found = [activations(params, x) for x in sides]
            return [sum(x)[0] / len(x) for x in zip(*found, strict=True)]

        def both(images):  # one by one, so that the activations stay in the processor's cache
            return jax.lax.map(one, images)

        compiled = jax.jit(both)
        moments = [
            np.concatenate(x)
            for x in zip(
                *[compiled(drawn[i : i + 250] / np.float32(255)) for i in range(0, 4000, 250)],
                strict=True,
            )
        ]
        fits = []
        for part in moments:
            centre, matrix = whitening(np.asarray(part), 0.3)
            fits.append((centre.astype(np.float32), matrix.astype(np.float32)))

        def whitened(images):
            pairs = zip(both(images), fits, strict=True)
            planes = [(x - centre) @ matrix for x, (centre, matrix) in pairs]
            return [jax.nn.standardize(x.reshape(len(x), -1)) for x in planes]

        maps = dict.fromkeys(f"_{name}" for name in DEPTHS)
    data = datasets.load("cifar10", "parquet", _DATA.value) if _DATA.value else None
    together = jax.jit(whitened)
    sets = (
        {"train": data.train.images}
        if data
        else {"drawn": np.load(f"{_DRAWN.value}_images.npy", mmap_mode="r")[:20_000, 4:36, 4:36]}
    )
    for split, images in sets.items():
        chunks = [
            [
                np.asarray(y, np.float16)
                for y in together(images[i : i + 250].astype(np.float32) / 255)
            ]
            for i in range(0, len(images), 250)
        ]
        for name, parts in zip(maps, zip(*chunks, strict=True), strict=True):
            np.save(f"{_OUT.value}{name}_{split}.npy", np.concatenate(parts))


if __name__ == "__main__":
    console.require("out")
    console.run(lambda: mapped() if _WEIGHTS.value else learn())
