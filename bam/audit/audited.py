"""A trainer whose runs take the steps of an audit, which watches them or breaks them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from bam.training.step import TrainState
from bam.training.trainer import Trainer

# (state, batch) -> the state after the step, as `Trainer.step`.
Step = Callable[..., TrainState]


def _audited_step(trainer: "AuditedTrainer") -> Step:
    return trainer.audited_step


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AuditedTrainer(Trainer):
    """A trainer with another step, see `with_step`."""

    audited_step: Step
    step = functools.cached_property(_audited_step)

    def check_step(self, *args: Any, **options: Any) -> None:
        """Compiles nothing: what an audit's step compiles, its first call compiles."""


def with_step(trainer: Trainer, step: Step) -> AuditedTrainer:
    """The same run, whose steps are those of `step`, called as `Trainer.step`."""
    fields = {field.name: getattr(trainer, field.name) for field in dataclasses.fields(Trainer)}
    return AuditedTrainer(**fields, audited_step=step)
