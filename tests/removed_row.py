"""What removing a row does to the others' sums, as users' compilers make them: printed as JSON.

Run without the tests' own XLA_FLAGS: `python -m tests.removed_row`. With microbatch sizes behind
it, their sums and the rows of convolutions.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bam
from bam import models
from bam.core import clipping, engine, grid, pytree, sampling
from bam.training import devices

CLIP = bam.clip_by_l2_norm(1.0)
SIGMA, NUM_GROUPS, DIM = 1.0, 40, 100
SIZES = (13,)


def squared(w, example):
    return 0.5 * (example["x"] @ w - example["y"]) ** 2


def on_an_edge(size, tries=50):
    """Rows whose residual is 0 at one place of a microbatch and an ulp at the place before.

    One in each group; all others have no gradient. None where this processor has no such places.
    """
    rng = np.random.default_rng(size)
    products = jax.jit(jax.vmap(jnp.dot, (None, 0)))
    for _ in range(tries):
        w = rng.normal(size=DIM).astype(np.float32)
        x = (1e4 * rng.normal(size=DIM)).astype(np.float32)
        found = np.asarray(products(w, np.broadcast_to(x, (size, DIM))))
        if len(places := np.flatnonzero(np.diff(found))):
            place = places[0] + 1
            data = {"x": np.zeros((NUM_GROUPS * size, DIM), np.float32)}
            data["y"] = np.zeros(NUM_GROUPS * size, np.float32)
            data["x"][place::size], data["y"][place::size] = x, found[place]
            return w, data
    return None


def noised_sum(size, keep_places, key, w, data, mask):
    noise = bam.GaussianNoise(key, SIGMA * clipping.ROUNDING)
    options = {"microbatch_size": size, "noise": noise, "mask": mask}
    options |= {"bound": clipping.bound_of(CLIP, CLIP.init(w)), "draw_places": not keep_places}
    return engine.per_example_sum(bam.dp_sgd(squared).grad, w, data, **options)[0]


def through_privatize(key, w, data, mask):
    grads = jax.vmap(bam.dp_sgd(squared).grad, (None, 0))(w, data)
    tx = bam.privatize(CLIP, SIGMA, 1.0, key)
    return tx.update(grads, tx.init(w), w, mask=mask)[0]


def repacked(data):
    """The rows without the first, moved up, and which of them are there."""
    rows = jax.tree.map(lambda x: np.concatenate([x[1:], np.zeros_like(x[:1])]), data)
    return rows, np.arange(len(data["y"])) < len(data["y"]) - 1


def both_sums(size, key, w, data, mask):
    """With drawn places and, the control, with rows packed: one program, one noise."""
    return [noised_sum(size, keep, key, w, data, mask) for keep in (False, True)]


def changes(size):
    """By how much the noised sum moves, over S, when a row without a gradient is removed."""
    key, everyone = bam.seeded_key(0), np.ones(NUM_GROUPS * size, bool)
    but_one = everyone & (np.arange(len(everyone)) > 0)
    found = on_an_edge(size)
    rows = {"x": np.ones((NUM_GROUPS * size, DIM)), "y": np.ones(NUM_GROUPS * size)}
    w, data = found or jax.tree.map(np.float32, (np.ones(DIM), rows))

    def moved(one, other):
        return float(jnp.linalg.norm(one - other))

    sums = jax.jit(functools.partial(both_sums, size, key))
    whole = sums(w, data, everyone)
    result = {"clipped_sum": moved(whole[0], sums(w, data, but_one)[0])}
    if found:
        result["control"] = moved(whole[1], sums(w, *repacked(data))[1])
    # The library's own loop: a vmap over the rows that `sampling.pad` places, here one row less
    # than there are places, and not the second: the first and that of the edge are there.
    few = jax.tree.map(lambda x: x[:size], data)
    batch = sampling.pad(np.delete(np.arange(size), slice(1, 2)), size, 0, 1)
    placed = jax.device_get(batch.take(few))
    without = batch.mask & (batch.indices != 0)
    own = functools.partial(jax.jit(through_privatize), key)
    if found:
        whole = own(w, few, np.ones(size, bool))
        result["loop control"] = moved(whole, own(w, *repacked(few)))
    result["loop"] = moved(own(w, placed, batch.mask), own(w, placed, without))
    return result


# Bits of every row, of other losses.


def one_unit(p, example):
    hidden = jnp.tanh(example["x"] @ p["w"] * 1e-4)
    return jnp.log1p(jnp.exp(hidden * p["b"] - example["y"] * 1e-4))


def exp_log(p, example):
    return jnp.exp(example["x"] @ p["w"] * 1e-5) - jnp.log(example["y"] ** 2 + jnp.exp(p["b"]))


def checksums(size, loss, make, params, key, data, mask, mesh):
    """Returns a checksum of each row's integers and, packed, of the integers at each place."""
    noise = bam.gaussian_noise(CLIP, SIGMA, key)
    bound = clipping.bound_of(CLIP, CLIP.init(params))

    def checked(params, grads):
        summand, _ = bound.bounded_grad(params, grads)
        cut = [grid.cut(x, noise.spacing).ravel() for x in jax.tree.leaves(summand)]
        mixed = jnp.concatenate(cut) * (2 * jnp.arange(sum(map(len, cut))) + 1)
        return summand, (jnp.sum(mixed) & (2**23 - 1)).astype(jnp.float32)

    options = {"microbatch_size": size, "noise": noise, "mesh": mesh, "mask": mask}
    options["bound"] = bound._replace(bounded_grad=checked)
    return engine.per_example_sum(make(loss).grad, params, data, **options)[1]


def rows_that_change(size, loss, make, params, data, mesh=None):
    """How many of the others' numbers change when a row is removed, from any of three places."""
    num = len(data["y"] if "y" in data else data["label"])
    fn = jax.jit(functools.partial(checksums, size, loss, make, params, mesh=mesh))
    key = bam.seeded_key(0)
    before, changed = np.asarray(fn(key, data, np.ones(num, bool))), 0
    for row in (0, num // 2, num - 1):
        others = np.arange(num) != row
        after = np.asarray(fn(key, data, others))
        changed += int(np.sum(after[others] != before[others]))
    return changed


def many_losses():
    rng = np.random.default_rng(0)
    methods = {
        "dp_sgd": bam.dp_sgd,
        "bam_exact": lambda loss: bam.bam_exact(loss, 0.02),
    }
    found = {}
    params = {"w": jnp.asarray(rng.normal(size=DIM), jnp.float32), "b": jnp.float32(0.7)}
    rows = {"x": 1e4 * rng.normal(size=(52, DIM)), "y": 1e4 * rng.normal(size=52)}
    rows = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rows)
    mesh = devices.mesh(jax.devices()[:2])
    for method, make in methods.items():
        found[f"one unit, {method}"] = rows_that_change(13, one_unit, make, params, rows)
    found["exp and log, two devices"] = rows_that_change(
        13, exp_log, bam.dp_sgd, params, rows, mesh
    )
    return found


def convolutions():
    rng = np.random.default_rng(0)
    found = {}
    images = {"image": rng.normal(size=(15, 1, 8, 8, 3)), "label": np.arange(15) % 4}
    images = {"image": jnp.asarray(images["image"], jnp.float32), "label": images["label"]}
    for convolution in ("matmul", "grouped", "tpu"):
        model = models.as_functions(
            models.create("convnet", 4, 4), (8, 8, 3), convolution=convolution
        )
        weights = model.init(jax.random.key(0))
        found[f"convolution {convolution}"] = rows_that_change(
            5, model.loss, lambda loss: bam.bam_sam(loss, 0.02), weights, images
        )
    return found


# Gradients that cancel: where a compiler computes one twice, once with fused products, the norm is
# that of zeros and what is scaled is an ulp times anything.


def cancelling(scale, example):
    difference = example["a"] * example["b"] - example["c"]
    return {"u": difference * scale, "v": difference.sum() * scale}


def moved_by_one(bounds, in_memory=True, size=8, dim=3):
    """The most, over S, that one of 24 rows moves the sum: of each clip, in one program.

    `bounds`: a clip, a gradient of a scale and an example, and the scale, by name.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(24, dim)).astype(np.float32) for _ in "ab")
    data = {"a": a, "b": b, "c": (a * b).astype(np.float32)}
    noise = bam.gaussian_noise(CLIP, SIGMA, bam.seeded_key(0))

    @jax.jit
    def totals(mask, noise):
        def total(clip, fn, scale):
            grad = lambda _, example: fn(jnp.float32(scale), example)  # noqa: E731
            options = {"mask": mask, "microbatch_size": size, "noise": noise}
            return bam.clipped_sum(grad, clip, None, data, **options)[0]

        return {name: total(*bound) for name, bound in bounds.items()}

    def barrier(read, values, carry, num_iterations):
        del num_iterations  # XLA's CPU compiler drops the barrier before it fuses
        return read(jax.lax.optimization_barrier(values), carry)

    most, read_from_memory = dict.fromkeys(bounds, 0.0), pytree.read_from_memory
    pytree.read_from_memory = read_from_memory if in_memory else barrier
    none = totals(np.zeros(24, bool), noise)
    for row in range(24):
        change = jax.tree.map(jnp.subtract, totals(np.arange(24) == row, noise), none)
        most = {name: max(most[name], float(optax.tree.norm(x))) for name, x in change.items()}
    pytree.read_from_memory = read_from_memory
    return most


def moved_in_a_whole_batch(num=8):
    """The same through `privatize`, of which a compiler knows that every row is there."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(num, 3)).astype(np.float32) for _ in range(2))
    data = {"a": a, "b": b, "c": (a * b).astype(np.float32)}
    like = jax.eval_shape(cancelling, jnp.float32(1), jax.tree.map(lambda x: x[0], data))
    tx = bam.privatize(CLIP, SIGMA, 1.0, bam.seeded_key(0))
    state = tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape), like))

    @jax.jit
    def noised(scale, data, state):
        return tx.update(jax.vmap(cancelling, (None, 0))(scale, data), state, mask=None)[0]

    none, most = noised(jnp.float32(1e12), jax.tree.map(np.zeros_like, data), state), 0.0
    for row in range(num):
        one = jax.tree.map(lambda x: np.where(np.arange(num)[:, None] == row, x, 0), data)  # noqa: B023
        change = jax.tree.map(jnp.subtract, noised(jnp.float32(1e12), one, state), none)
        most = max(most, float(optax.tree.norm(change)))
    return most


def cancelling_changes():
    in_clip = lambda example, *_: cancelling(jnp.float32(1e12), example)  # noqa: E731
    own = clipping.BoundedTransformation(
        lambda params: (), lambda g, state, params=None: (in_clip(g), state), 1.0
    )
    itself = lambda scale, example: example  # noqa: E731
    bounds = {
        "clip_by_l2_norm": (CLIP, cancelling, 1e12),
        "normalize": (bam.normalize(1.0), cancelling, 1e7),
        "clip_per_layer": (bam.clip_per_layer(1.0), cancelling, 1e12),
        "a clip of one's own": (own, itself, 1e12),
        "a chain": (bam.chain(optax.stateless(in_clip), CLIP), itself, 1e12),
    }
    control = moved_by_one({"control": bounds["clip_by_l2_norm"]}, in_memory=False)
    whole = {"privatize, of all rows": moved_in_a_whole_batch()}
    return moved_by_one(bounds) | whole | control


if __name__ == "__main__":
    sizes = [int(size) for size in sys.argv[1:]]
    print(json.dumps({"sums": {size: changes(size) for size in sizes or SIZES},
                      "rows": convolutions() if sizes else many_losses(),
                      "bounds": {} if sizes else cancelling_changes()}))  # fmt: skip
