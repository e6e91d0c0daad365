"""An audit of the training loop: real runs, stopped and resumed, with and without a seed.

`record` runs `loop.train` and records the batch and the noise of every step. `p_values` tests the
assumptions of the proof: the noise is new, has the right size, and is independent in every entry
of every step of every run; each example is in each batch with probability q, independently of all
else.

The noise of a step is its privatised sum minus the clipped gradients of its batch, which
`Trainer.mean_gradients` computes again. A gradient that is wrong in both is not found here, but by
the canary of `bam.audit.canary`.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, PyTree
from scipy import signal

from bam.audit import checks
from bam.audit.audited import with_step
from bam.core import sampling
from bam.errors import InputError
from bam.privacy.private_gradient import DrawnBatch
from bam.training import loop
from bam.training.step import TrainState
from bam.training.trainer import Trainer


class ObservedRun(NamedTuple):
    """A run as an observer records it: each step's noise, and the examples in its batch.

    A row of `noise` has all leaves of a step, divided by the planned deviation σ·S. `renewed` is
    the step after which secret randomness was drawn anew, 0 if it was not.
    """

    noise: Float[np.ndarray, "steps entries"]
    members: Bool[np.ndarray, "steps examples"]
    renewed: int = 0

    def parts(self) -> list["ObservedRun"]:
        """The run before and after new randomness was drawn, or the run itself if it was not."""
        cuts = [self.renewed] if self.renewed else []
        pieces = (np.split(x, cuts) for x in (self.noise, self.members))
        return [ObservedRun(*piece) for piece in zip(*pieces, strict=True)]


def record(trainer: Trainer, seed: int | None, cut: int = 0) -> ObservedRun:
    """Runs `loop.train` and returns what it observed.

    Unless `cut` is 0, training stops after step `cut` and resumes. The model must be small, because
    all noise stays in memory. InputError if the run is not private, or if a clip of the user's has
    a `finish`, which may hide the noise.
    """
    plan = trainer.plan
    noise_std = plan.noise_multiplier * trainer.sensitivity
    if not noise_std > 0:
        raise InputError("only a private run has noise to audit")
    clip = trainer.parts.gradient.clip
    # The `finish` of a clip of bam's own returns the noised mean of gradients as it is.
    if clip.finish is not None and not clip.is_proved:
        raise InputError(
            "the audit cannot see the noise of a clip that has its own `finish`: choose another "
            "clip"
        )
    noise: list[np.ndarray] = []
    members: list[np.ndarray] = []

    def recording_step(state: TrainState, batch: DrawnBatch) -> TrainState:
        expected = clipped_gradient_sum(trainer, state, batch)
        state = trainer.step(state, batch)
        noised = plan.expected_batch_size * flat(state.private.previous)
        noise.append((noised - expected) / noise_std)
        members.append(np.zeros(plan.num_examples, bool))
        members[-1][np.asarray(batch.examples["row"])[np.asarray(batch.mask)]] = True
        return state

    recorded = with_step(trainer, recording_step)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) if cut else None
        if cut:
            with contextlib.suppress(loop.StoppedError):
                loop.train(recorded, seed, workdir, should_stop=lambda: len(noise) == cut)
        loop.train(recorded, seed, workdir)
    return ObservedRun(np.array(noise), np.array(members), renewed=cut if seed is None else 0)


def audit(trainer: Trainer) -> dict[str, float]:
    """Returns `p_values` of three runs, each stopped in the middle and resumed.

    The first run has a seed, the others have none.
    """
    cut = trainer.plan.num_steps // 2
    return p_values(trainer, [record(trainer, seed, cut) for seed in (0, None, None)])


def p_values(trainer: Trainer, runs: Sequence[ObservedRun]) -> dict[str, float]:
    """p-values of recorded runs, tested against the plan and against each other.

    They are those of `checks.noise_p_values` and `checks.batches_p_values`; see `checks.failures`.
    The runs must be independent: at most one for each seed.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda: trainer.init(0).params))
    runs = [part for run in runs for part in run.parts()]
    # Correlated noise is C⁻¹ z, with the strategy C, so C leaves the independent z to test. After
    # a resume with new randomness z starts anew, so the parts are filtered one by one.
    strategy = trainer.plan.mechanism.strategy
    fresh = [signal.lfilter(strategy, [1.0], run.noise, axis=0) for run in runs]
    noise_p_values = checks.noise_p_values(fresh, [leaf.size for leaf in leaves])
    return noise_p_values | checks.batches_p_values([run.members for run in runs], trainer.plan)


def flat(tree: PyTree) -> Float[np.ndarray, " entries"]:
    """All leaves end to end, in float64 on the host."""
    return np.concatenate(
        [np.ravel(x).astype(float) for x in jax.tree.leaves(jax.device_get(tree))]
    )


def clipped_gradient_sum(
    trainer: Trainer, state: TrainState, batch: DrawnBatch
) -> Float[np.ndarray, " entries"]:
    """Returns the sum of a batch's clipped gradients, without its padding, as `flat` returns it.

    NOT PRIVATE.
    """
    # The mean is of all rows, so the padding's part is computed and subtracted.
    num_padding = int(np.sum(~np.asarray(batch.mask)))
    rows, padding = (
        len(x["row"]) * flat(trainer.mean_gradients(state, x)[0].clipped)
        for x in (batch.examples, trainer.rows(np.full(1, sampling.PADDING, np.int32)))
    )
    return rows - num_padding * padding
