"""Timing of compiled functions: medians with spread, compilation apart."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Seconds per call.

    Attributes:
      median: over all repeats.
      low: first quartile.
      high: third quartile.
      compile_seconds: tracing and compiling, once.
    """

    median: float
    low: float
    high: float
    compile_seconds: float


def compile_timed(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Compiles `fn` for `args` without running it; returns it and the seconds that took."""
    started = time.perf_counter()
    compiled = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args).compile()
    return compiled, time.perf_counter() - started


def measure(
    calls: Mapping[str, Callable[[], Any]], trials: int, repeats: int
) -> dict[str, list[float]]:
    """Times several calls in turn, so that what else the machine does meets all of them.

    Args:
      calls: name -> call without arguments whose result can be waited for.
      trials: rounds through all calls.
      repeats: calls in a row per round, timed together; their mean is one observation.

    Returns:
      Name -> seconds per call, one number per trial. A first, untimed round warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(trials + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(call())
            if trial > 0:
                seconds[name].append((time.perf_counter() - started) / repeats)
    return seconds


def summarize(seconds: list[float], compile_seconds: float) -> Timing:
    """Median and quartiles of the observations."""
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], compile_seconds)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, compile_seconds)


def matrix_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Multiplications and additions in the matrix products and convolutions of `fn(*args)`.

    Args:
      fn: traced, not run.
      *args: arrays or their shapes.

    Returns:
      A count; a loop's body counts once per turn of a `scan`.
    """
    return _matrix_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _matrix_flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        size = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * size * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * size * math.prod(kernel) // features
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
                total += turns * _matrix_flops(inner)
    return total
