"""How a step is computed fastest on this device: convolution formulation and microbatch size.

Both change a step's speed and memory, and its result only by float rounding. They are found by
timing the per-example gradient sum on blank images, so no private data is read.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bam import devices
from bam.report import device_name, write_json

# Growing the microbatch stops once a size is not faster per example by this factor.
WORTH_IT = 0.95
# (formulation, sizes to try in turn); the first size decides between formulations.
CPU_CHOICES = {"matmul": (1, 8)}
ACCELERATOR_CHOICES = {form: (16, 64, 256, 1024) for form in ("xla", "matmul")}


class Choice(NamedTuple):
    """What was found.

    Attributes:
      convolution: "matmul" or "xla", see `bam.models.layers.convolutions_as`.
      microbatch_size: examples whose gradients are held in memory at once.
    """

    convolution: str
    microbatch_size: int


def fastest(
    make_step: Callable[[str, int], Callable[[int], Any]],
    facts: Any,
    convolutions: Sequence[str] = (),
    sizes: Sequence[int] = (),
    largest: int | None = None,
) -> Choice:
    """Times a step's candidates, once: the answer is kept in memory and, if there is one, on disk.

    The file is `tuning.json` in JAX's compilation cache folder. What does not fit the device's
    memory is passed over.

    Args:
      make_step: `(convolution, microbatch size) -> step`; `step(number of examples)` computes on so
        many examples and returns arrays to wait for.
      facts: JSON values that the answer depends on: model, shapes, method. The device and JAX's
        version are added here.
      convolutions: formulations to choose from; all that suit the device, if empty.
      sizes: microbatch sizes to choose from, growing; likewise.
      largest: microbatches larger than this are not tried.

    Returns:
      The `Choice` with the least time per example.

    Raises:
      ValueError: if not even the first candidate fits the device's memory.
    """
    choices = CPU_CHOICES if jax.default_backend() == "cpu" else ACCELERATOR_CHOICES
    candidates = {form: tuple(sizes) or choices[form] for form in convolutions or choices}
    if largest is not None:
        candidates = {
            form: tuple(s for s in tried if s <= largest) or (min(tried[0], largest),)
            for form, tried in candidates.items()
        }
    question = json.dumps([facts, candidates, device_name(), jax.__version__], sort_keys=True)
    key = hashlib.sha256(question.encode()).hexdigest()[:16]
    if key not in _found:
        _found.update({k: Choice(*v) for k, v in _read().items()})
    forms = list(candidates)
    known = _found.get(key)
    mine = np.array([forms.index(known.convolution), known.microbatch_size] if known else [-1, 0])
    form, size = (int(x) for x in devices.first_ones(mine))
    if form >= 0:
        _found[key] = Choice(forms[form], size)
    else:
        _found[key] = _measure(make_step, candidates)
        if devices.writes():
            _write(key, _found[key])
    return _found[key]


_found: dict[str, Choice] = {}


def _measure(
    make_step: Callable[[str, int], Callable[[int], Any]], candidates: dict[str, tuple[int, ...]]
) -> Choice:
    first = {
        Choice(form, sizes[0]): _seconds_per_example(make_step, form, sizes[0])
        for form, sizes in candidates.items()
    }
    best = min(first, key=lambda choice: first[choice])
    seconds = first[best]
    if seconds == float("inf"):
        raise ValueError(
            f"not even {best.microbatch_size} examples at once fit the memory of {device_name()}; "
            "set --config.microbatch_size to fewer"
        )
    for size in candidates[best.convolution][1:]:
        larger = _seconds_per_example(make_step, best.convolution, size)
        if larger > WORTH_IT * seconds:
            break
        best, seconds = Choice(best.convolution, size), larger
    return best


def _seconds_per_example(
    make_step: Callable[[str, int], Callable[[int], Any]], form: str, size: int
) -> float:
    """The least of three timings; infinite if it does not fit the memory."""
    num_examples = max(8, 2 * size)
    try:
        step = make_step(form, size)
        jax.block_until_ready(step(num_examples))
        timings = []
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready(step(num_examples))
            timings.append(time.perf_counter() - started)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return float("inf")
    return float(devices.first_ones(np.float32(min(timings) / num_examples)))


def _file() -> Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(folder) / "tuning.json" if folder and "://" not in folder else None


def _read() -> dict[str, Any]:
    path = _file()
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}  # not there, or broken off: it is found again


def _write(key: str, choice: Choice) -> None:
    path = _file()
    if path is not None:
        os.makedirs(path.parent, exist_ok=True)
        write_json(path, _read() | {key: list(choice)})
