"""Evaluates a JAX function without compiling it, for functions that run once, such as `init`.

XLA compiles the initialiser of each array anew, and that can take longer than a short training.
Here JAX only traces the function, and its operations are evaluated one by one. NumPy evaluates
those whose rounding IEEE 754 defines. JAX evaluates `ROUNDED` functions and random bits, in blocks
of one size, so a few small programs serve all networks, seeds and settings. JAX also runs each
operation that has no row in `ROWS`.

Results equal those of `jax.jit` up to rounding; integers and random bits are equal.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, PyTree, UInt32

from bam.core.tracing import is_tracing

BLOCK = 2**16  # entries in one call of a compiled program
GENERATOR = "threefry2x32"
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class _Slot:
    """A value of a traced function: None, then the computed NumPy array or JAX keys."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


_Step = tuple[Any, list[_Slot], list[_Slot]]  # equation of a jaxpr, inputs, outputs


def interpret(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns the value of a pure function, computed without a compiled program of this function.

    Operations that the result does not need are left out. If JAX is tracing, the function is called
    as it is and becomes part of the trace.

    Args:
      function: a traceable function of arrays and JAX keys.
      args: pytrees of arrays and keys.

    Returns:
      The function's pytree with new arrays on the default device; no two share memory.

    Examples:
      >>> interpret(lambda key: {"w": jax.random.normal(key, (2,))}, jax.random.key(0))["w"].shape
      (2,)
    """
    if is_tracing():
        return function(*args)
    traced, like = jax.make_jaxpr(function, return_shape=True)(*args)
    steps: list[_Step] = []
    results = _flatten(traced, [_Slot(_host(x)) for x in jax.tree.leaves(args)], steps)
    steps = _needed_steps(steps, results)
    with np.errstate(all="ignore"), _on_cpu():  # unsigned integers overflow on purpose
        while steps:  # `pop` frees each value after the last step that needs it
            equation, inputs, outputs = steps.pop()
            for slot, value in zip(outputs, _values(equation, inputs), strict=True):
                slot.value = value
    return jax.tree.unflatten(jax.tree.structure(like), [_on_device(x.value) for x in results])


def _flatten(program: Any, inputs: list[_Slot], steps: list[_Step]) -> list[_Slot]:
    """Appends the equations of a jaxpr to `steps`, with those of called functions inlined.

    Returns the slots of its outputs.
    """
    jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    slots = dict(zip(jaxpr.invars, inputs, strict=True))
    slots |= {x: _Slot(_host(value)) for x, value in zip(jaxpr.constvars, constants, strict=True)}

    def slot(atom: Any) -> _Slot:
        literal = isinstance(atom, Literal)
        return _Slot(np.asarray(atom.val, atom.aval.dtype)) if literal else slots[atom]

    for equation in jaxpr.eqns:
        operands = [slot(x) for x in equation.invars]
        if equation.primitive.name in CALLS:
            callee = next(equation.params[x] for x in CALLEE if x in equation.params)
            results = _flatten(callee, operands, steps)
        else:
            results = [_Slot() for _ in equation.outvars]
            steps.append((equation, operands, results))
        slots |= zip(equation.outvars, results, strict=True)
    return [slot(x) for x in jaxpr.outvars]


def _needed_steps(steps: list[_Step], results: Sequence[_Slot]) -> list[_Step]:
    """Returns the steps that the results need, in reverse order."""
    needed, selected = {id(x) for x in results}, []
    for step in reversed(steps):
        if any(id(x) in needed for x in step[2]):
            needed |= {id(x) for x in step[1]}
            selected.append(step)
    return selected


def _values(equation: Any, inputs: list[_Slot]) -> list[Any]:
    """Returns the results of an equation, by its row in `ROWS` or by JAX.

    A row returns NotImplemented for operands that only JAX computes right.
    """
    values, primitive = [x.value for x in inputs], equation.primitive
    result: Any = NotImplemented
    if row := ROWS.get(primitive.name):
        arrays = values[1:] if primitive.name in KEYED else values
        if all(isinstance(x, np.ndarray) for x in arrays):
            result = row(equation.params, *values)
    if result is not NotImplemented:
        dtype = equation.outvars[0].aval.dtype
        return [result if _is_key(result) else np.asarray(result, dtype)]
    with equation.ctx.manager:
        results = primitive.bind(*values, **equation.params)
    return [_host(x) for x in (results if primitive.multiple_results else [results])]


def _host(value: Any) -> Any:
    """Returns an array as NumPy's, and a key unchanged."""
    return value if _is_key(value) else np.asarray(value)


def _on_device(value: Any) -> Array:
    """Returns a copy on the default device.

    NumPy copies, because JAX on a CPU may keep the memory it is given.
    """
    if _is_key(value):
        words = _on_device(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return jax.device_put(np.array(value))


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Runs programs on the CPU, if JAX has one, so that all machines compute equal numbers."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    with jax.default_device(device):
        yield


# ---------------------------------------------------------------- Random numbers.


def threefry(key: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Returns Threefry-2×32 with 20 rounds, equal to JAX's.

    Words are arrays of NumPy or JAX. The rounds are unrolled, because XLA compiles JAX's loop over
    them to several programs for each array. Source: Salmon et al. 2011, "Parallel random numbers:
    as easy as 1, 2, 3".
    """
    words = [key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    high, low = high + words[0], low + words[1]
    for i in range(5):
        for by in ROTATIONS[i % 2]:
            high = high + low
            low = ((low << np.uint32(by)) | (low >> np.uint32(32 - by))) ^ high
        high = high + words[(i + 1) % 3]
        low = low + words[(i + 2) % 3] + np.uint32(i + 1)
    return high, low


@jax.jit
def _block_of_bits(key: UInt32[Array, "2"], start: UInt32[Array, ""]) -> UInt32[Array, " block"]:
    """Returns `BLOCK` words of JAX's random bits of a key, from entry `start` on."""
    counts = start + jnp.arange(BLOCK, dtype=jnp.uint32)
    high, low = threefry(key, jnp.zeros_like(counts), counts)
    return high ^ low


def _words(key: Any) -> np.ndarray | None:
    """Returns the two words of a single key of JAX's default generator, or None for other keys."""
    config: Any = jax.config
    is_default = str(jax.random.key_impl(key)) == GENERATOR and config.jax_threefry_partitionable
    return np.asarray(jax.random.key_data(key)) if is_default and not key.shape else None


def _bits(params: dict[str, Any], key: Array) -> Any:
    words, size = _words(key), math.prod(params["shape"])
    if words is None or params["bit_width"] > 32 or size > 2**32:
        return NotImplemented
    blocks = [_block_of_bits(words, np.uint32(start)) for start in range(0, size, BLOCK)]
    return _join(blocks, params["shape"], np.dtype(np.uint32))


def _fold_in(params: dict[str, Any], key: Array, data: np.ndarray) -> Any:
    words = _words(key)
    if words is None or data.shape:
        return NotImplemented
    low = data.astype(np.uint32).reshape(1)
    return _key(np.concatenate(threefry(words, np.zeros_like(low), low)))


def _split(params: dict[str, Any], key: Array) -> Any:
    words, shape = _words(key), params["shape"]
    if words is None:
        return NotImplemented
    low = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return _key(np.stack(threefry(words, np.zeros_like(low), low), axis=-1))


def _key(words: np.ndarray) -> Array:
    return jax.random.wrap_key_data(jnp.asarray(words), impl=GENERATOR)


# ---------------------------------------------------------------- Numbers.


def _join(blocks: Sequence[Any], shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns the first entries of all blocks, in this shape."""
    flat = [np.asarray(x) for x in blocks] or [np.zeros(0, dtype)]
    return np.concatenate(flat)[: math.prod(shape)].reshape(shape)


def _in_blocks(function: Callable[[Array], Array]) -> Callable[..., np.ndarray]:
    """Returns a row for an elementwise function that JAX rounds differently from NumPy."""
    compiled = jax.jit(function)

    def row(params: dict[str, Any], x: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-x.size // BLOCK) * BLOCK, x.dtype)
        padded[: x.size] = x.ravel()
        blocks = [compiled(padded[i : i + BLOCK]) for i in range(0, len(padded), BLOCK)]
        return _join(blocks, x.shape, x.dtype)

    return row


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a row for a NumPy function with the results of JAX."""
    return lambda params, *values: function(*values)


def _shift_right(params: dict[str, Any], x: np.ndarray, by: np.ndarray) -> Any:
    # NumPy shifts signed integers arithmetically, and this is the logical shift.
    return NotImplemented if np.issubdtype(x.dtype, np.signedinteger) else x >> by


def _div(params: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Any:
    is_integer = np.issubdtype(x.dtype, np.integer)  # JAX rounds their quotient towards 0
    return NotImplemented if is_integer else x / y


def _convert(params: dict[str, Any], x: np.ndarray) -> Any:
    to_integer = jnp.issubdtype(params["new_dtype"], jnp.integer)  # JAX saturates, NumPy wraps
    if to_integer and jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    return x.astype(params["new_dtype"])


def _same_bits(params: dict[str, Any], x: np.ndarray) -> Any:
    dtype = np.dtype(params["new_dtype"])
    return x.view(dtype) if dtype.itemsize == x.dtype.itemsize else NotImplemented


def _broadcast(params: dict[str, Any], x: np.ndarray, *sizes: np.ndarray) -> np.ndarray:
    shape, axes = params["shape"], params["broadcast_dimensions"]
    expanded = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        expanded[axis] = size
    return np.broadcast_to(x.reshape(expanded), shape)


def _select(params: dict[str, Any], condition: np.ndarray, *cases: np.ndarray) -> Any:
    return np.where(condition, cases[1], cases[0]) if condition.dtype == bool else NotImplemented


CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")
CALLEE = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # names of the parameter with the called function
KEYED = ("random_bits", "random_fold_in", "random_split")  # operations whose first input is a key
EXACT: dict[str, Callable[..., Any]] = {  # rounded as IEEE 754 defines, or not at all
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "sqrt": np.sqrt},
    **{"max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs, "sign": np.sign},
    **{"or": np.bitwise_or, "and": np.bitwise_and, "xor": np.bitwise_xor},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "nextafter": np.nextafter},
    **{"shift_left": np.left_shift, "stop_gradient": np.asarray, "copy": np.asarray},
}
ROUNDED = (jax.lax.erf, jax.lax.erf_inv, jax.lax.exp, jax.lax.log, jax.lax.log1p)
ROWS: dict[str, Callable[..., Any]] = {
    **{name: _exact(function) for name, function in EXACT.items()},
    **{function.__name__: _in_blocks(function) for function in ROUNDED},
    "div": _div,
    "shift_right_logical": _shift_right,
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _same_bits,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "random_bits": _bits,
    "random_fold_in": _fold_in,
    "random_split": _split,
}
