"""Schedules of the learning rate: public, because they depend only on the step's number."""

from collections.abc import Callable
from typing import NamedTuple

import optax

from bam.core.scalars import Number
from bam.errors import InputError
from bam.text import plural

# `(peak, number of steps)` -> optax's schedule.
SCHEDULES: dict[str, Callable[[Number, int], optax.Schedule]] = {
    "constant": lambda peak, num_steps: optax.constant_schedule(peak),
    "cosine": optax.cosine_decay_schedule,
    "linear": lambda peak, num_steps: optax.linear_schedule(peak, 0.0, num_steps),
}


class Schedule(NamedTuple):
    """A schedule: its name in `SCHEDULES`, the number of warm-up steps and that of all steps."""

    name: str = "constant"
    warmup_steps: int = 0
    num_steps: int = 1


def learning_rate(schedule: Schedule, peak: Number) -> Number | optax.Schedule:
    """Returns the rate as a function of the step, which counts from 0.

    A rate that never changes is a number. Otherwise it rises linearly to the peak in W steps of
    warm-up, from peak / W in step 0, and then follows the schedule. The peak may be traced, so that
    another peak compiles nothing. InputError for an unknown schedule, or if the warm-up takes the
    whole run.

    Examples:
      >>> rate = learning_rate(Schedule("linear", 2, 6), 1.0)
      >>> [round(float(rate(step)), 2) for step in range(6)]
      [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    name, warmup_steps, num_steps = schedule
    if name not in SCHEDULES:
        raise InputError(f"unknown optimizer.schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    if not 0 <= warmup_steps < max(1, num_steps):
        raise InputError(
            f"optimizer.warmup_steps must be at least 0 and below the run's {num_steps} steps, got "
            f"{warmup_steps}"
        )
    if name == "constant" and not warmup_steps:
        return peak
    after = SCHEDULES[name](peak, num_steps - warmup_steps)
    if not warmup_steps:
        return after
    # From step 0 to step W - 1 there are W - 1 increments. With W = 1, step 0 has the peak, but
    # optax wants a positive number.
    up = optax.linear_schedule(peak * (1 / warmup_steps), peak, max(1, warmup_steps - 1))
    return optax.join_schedules([up, after], [warmup_steps])


def in_words(schedule: Schedule) -> str:
    """Returns the words on the rate in the printed plan, or "" for a constant rate."""
    falls = {"constant": "", "linear": "falls to 0 in a line", "cosine": "falls to 0 as a cosine"}
    rises = f"rises over {plural(schedule.warmup_steps, 'step')}" if schedule.warmup_steps else ""
    return " and then ".join(x for x in (rises, falls[schedule.name]) if x)
