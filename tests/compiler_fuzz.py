"""Sums that a step is made of, compiled, against NumPy in float64: python -m tests.compiler_fuzz.

Prints one line of JSON: `checks`, `wrong`, the checks that were off by more than rounding, and
`known`, those of a fault of XLA's that nothing here meets.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np

import bam
from bam.core import pytree
from bam.models import layers

RNG = np.random.default_rng(0)
ROWS = (1, 3, 16, 33, 257, 4097, 16385, 32769, 40001)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def wide(x):
    return np.asarray(x, np.float64)


def error(actual, expected):
    """Largest error, relative to the size of the entries around it."""
    actual, expected = wide(actual), wide(expected)
    if not np.all(np.isfinite(actual)):
        return np.inf
    floor = 1e-3 * np.max(np.abs(expected)) + 1e-30
    return np.max(np.abs(actual - expected) / np.maximum(np.abs(expected), floor))


def norms():
    for rows, shape in itertools.product(ROWS, [(3,), (2, 3), (17,), (33, 5), (3, 3, 4, 8)]):
        if rows * np.prod(shape) > 2e6:
            continue
        x, y = normal(rows, *shape), normal(rows, 7)
        squares = (wide(x) ** 2).reshape(rows, -1).sum(1) + (wide(y) ** 2).sum(1)
        found = jax.jit(jax.vmap(lambda x, y: pytree.l2_norm({"x": x, "y": y})))(x, y)
        yield f"norms of {rows} trees of {shape}", found, np.sqrt(squares)
        yield (
            f"sum of {rows} rows of {shape}",
            jax.jit(lambda x: abs(x).sum(0))(x),
            abs(wide(x)).sum(0),
        )
    for size in (1, 255, 4097, 65537, 1000003):
        x = normal(size)
        yield f"norm of {size}", jax.jit(pytree.l2_norm)(x), np.linalg.norm(wide(x))


def products_before_sums():
    def square(matrix, row):
        return jnp.sum((matrix @ row) ** 2)

    def norm(matrix, row):  # of the gradient matrix @ row
        grad = bam.dp_sgd(lambda w, row: w @ (matrix @ row)).grad
        return pytree.l2_norm(grad(jnp.zeros(len(matrix)), row))

    def with_constant(x, constant):
        filled = jnp.full((x.shape[2], x.shape[1]), constant)
        return jnp.sum((x @ filled) ** 2, -1)

    def after_ones(x):
        return jnp.sum((jnp.ones((3, x.shape[1])) @ x) ** 2, -1)

    for rows, (m, k) in itertools.product(ROWS, [(1, 1), (2, 3), (3, 3), (4, 2), (8, 8), (3, 33)]):
        if rows * max(m, k) > 1e6:
            continue
        matrix, x = normal(m, k), normal(rows, k)
        found = jax.jit(jax.vmap(square, (None, 0)))(matrix, x)
        yield (
            f"{rows} squares of {m}x{k} times row",
            found,
            ((wide(x) @ wide(matrix).T) ** 2).sum(1),
        )
        found = jax.jit(jax.vmap(norm, (None, 0)))(matrix, x)
        expected = np.linalg.norm(wide(x) @ wide(matrix).T, axis=1)
        yield f"{rows} norms of gradients of {m} from {k}", found, expected
    for batch, m, k in [(5, 60, 60), (3, 7, 9), (16, 33, 65), (2, 128, 256), (33, 16, 16)]:
        x, y = abs(normal(batch, m, k)), abs(normal(batch, k, m))
        found = jax.jit(lambda x, y: jnp.sum((x @ y) ** 2, (1, 2)))(x, y)
        yield f"products {batch, m, k}", found, ((wide(x) @ wide(y)) ** 2).sum((1, 2))
        found = jax.jit(with_constant)(x, 0.5)
        yield f"products with a constant {batch, m, k}", found, m * (wide(x).sum(2) / 2) ** 2
        found = jax.jit(after_ones)(x)
        expected = np.repeat((wide(x).sum(1) ** 2).sum(1)[:, None], 3, 1)
        yield f"ones times {batch, m, k}", found, expected


def group_norms():
    cases = itertools.product([(4, 8, 4), (8, 16, 16), (16, 64, 32), (5, 6, 3)], [1, 3, 16])
    for (side, channels, groups), batch in cases:
        x, u = normal(batch, side, side, channels), normal(batch, side, side, channels)
        layer = layers.GroupNorm(groups)
        scale, bias = 1 + 0.1 * normal(channels), 0.1 * normal(channels)
        params = {"params": {"scale": scale, "bias": bias}}

        def loss(params, x, u, layer=layer):
            return jnp.sum(layer.apply(params, x[None])[0] * u)

        grad = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, 0, 0)))
        of_params, of_x = grad(params, x, u)
        grouped = wide(x).reshape(batch, side * side, groups, -1)
        inverse = 1 / np.sqrt(grouped.var((1, 3), keepdims=True) + 1e-5)
        unit = (grouped - grouped.mean((1, 3), keepdims=True)) * inverse
        up = wide(u).reshape(grouped.shape)
        inner = up * wide(scale).reshape(groups, -1)
        mean = inner.mean((1, 3), keepdims=True) + unit * (inner * unit).mean((1, 3), keepdims=True)
        name = f"GroupNorm of {batch, side, channels, groups}: "
        yield name + "x", of_x, (inverse * (inner - mean)).reshape(x.shape)
        yield name + "scale", of_params["params"]["scale"], (up * unit).sum(1).reshape(batch, -1)
        yield name + "bias", of_params["params"]["bias"], up.sum(1).reshape(batch, -1)


def bounded(gradients):
    """Their norms, and the sums of what is clipped at 1."""
    norms = np.sqrt(sum((g**2).reshape(len(g), -1).sum(1) for g in gradients))
    factor = np.minimum(1, 1 / norms)
    return norms, [np.einsum("b,b...->...", factor, g) for g in gradients]


def clipped_sums():
    sizes = [(3, 4, 2), (3, 3, 3), (20, 32, 10)]
    for rows, micro, (k, hidden, m) in itertools.product([7, 300, 33000], [1, 16, 33000], sizes):
        if rows / min(micro, rows) > 400 or rows * k * hidden > 1e7:
            continue
        params = [normal(k, hidden), normal(hidden), normal(hidden, m)]
        x, t = normal(rows, k), normal(rows, m)

        def loss(p, e):
            return 0.5 * jnp.sum((jnp.tanh(e[0] @ p[0] + p[1]) @ p[2] - e[1]) ** 2)

        total, norms = summed(loss, params, (x, t), micro)
        a, b, c = map(wide, params)
        h = np.tanh(wide(x) @ a + b)
        r = h @ c - wide(t)
        of_h = (r @ c.T) * (1 - h**2)
        expected = bounded([wide(x)[:, :, None] * of_h[:, None], of_h, h[:, :, None] * r[:, None]])
        yield from compared(f"network {rows, micro, k, hidden, m}", total, norms, expected)
    shapes = [(8, 3, 16, 4), (4, 4, 4, 3), (16, 3, 32, 10), (8, 32, 64, 10)]
    for (side, c, f, m), (rows, micro) in itertools.product(shapes, [(4, 1), (4, 4), (40, 16)]):
        params = [0.3 * normal(3, 3, c, f), 0.3 * normal(f, m)]
        x, t = normal(rows, side, side, c), normal(rows, m)

        def loss(p, e):  # every pixel of the convolution has the same derivative
            with layers.convolutions_as("matmul"):
                pooled = jnp.mean(layers.conv2d(e[0][None], p[0]), (0, 1, 2))
            return 0.5 * jnp.sum((pooled @ p[1] - e[1]) ** 2)

        total, norms = summed(loss, params, (x, t), micro)
        padded = np.pad(wide(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3)]
        patches = np.stack(shifted, 3).mean((1, 2)).reshape(rows, 3, 3, c)
        pooled = np.einsum("bijc,ijcf->bf", patches, wide(params[0]))
        r = pooled @ wide(params[1]) - wide(t)
        of_kernel = np.einsum("bijc,bf->bijcf", patches, r @ wide(params[1]).T)
        expected = bounded([of_kernel, pooled[:, :, None] * r[:, None]])
        yield from compared(f"convolution {rows, micro, side, c, f, m}", total, norms, expected)


def loops():
    """Yields short loops, with what they compute and what is expected.

    XLA's CPU compiler runs `while (i < 1) i += 2` no times where it knows the limit.
    """
    for limit, by in itertools.product((0, 1, 2, 3, 5, 10), (1, 2, 3, 7)):

        @functools.partial(jax.jit, static_argnums=1)
        def turns(x, is_known, limit=limit, by=by):
            end = limit if is_known else limit + (x > 2).astype(jnp.int32)
            body = lambda state: (state[0] + by, state[1] + x)  # noqa: E731
            return jax.lax.while_loop(lambda state: state[0] < end, body, (0, jnp.zeros(())))[1]

        for is_known in (True, False):
            kind = "XLA's own: " if is_known and limit == 1 and by > 1 else ""
            name = f"{kind}while (i < {limit}) i += {by}, {'known' if is_known else 'unknown'}"
            yield name, turns(jnp.float32(1), is_known), -(-limit // by)
    for turns_, shape in itertools.product((0, 1), ((), (1,), (4,), (64,), (3, 5))):
        constant = lambda t, shape=shape: pytree.read_from_memory(  # noqa: E731
            lambda x, total: total + pytree.l2_norm(x), jnp.full(shape, 0.5), jnp.zeros(()), t
        )
        expected = turns_ * 0.5 * np.sqrt(np.prod(shape))
        yield f"norm in {turns_} turns of {shape}", jax.jit(constant)(jnp.int32(turns_)), expected
        known = jax.jit(lambda t=turns_, f=constant: f(jnp.int32(t)))()
        yield f"norm in {turns_} known turns of {shape}", known, expected


def summed(loss, params, batch, micro):
    grad, clip = bam.dp_sgd(loss).grad, bam.clip_by_l2_norm(1.0)
    step = jax.jit(lambda p, b: bam.clipped_sum(grad, clip, p, b, mask=None, microbatch_size=micro))
    return step([jnp.asarray(p) for p in params], batch)


def compared(name, total, norms, expected):
    yield f"{name}: norms", norms, expected[0]
    for i, (actual, wanted) in enumerate(zip(total, expected[1], strict=True)):
        yield f"{name}: sum of leaf {i}", actual, wanted


def main(parts=(loops, norms, products_before_sums, group_norms, clipped_sums)):
    checks, wrong, known = 0, {}, {}
    for part in parts:
        for name, actual, expected in part():
            checks += 1
            off = error(actual, expected)
            if not off < 3e-3:
                (known if name.startswith("XLA's own") else wrong)[name] = f"{off:.2g}"
    print(json.dumps({"checks": checks, "wrong": wrong, "known": known}))


if __name__ == "__main__":
    main()
