"""An audit of the loop itself: real runs, cut and resumed, with and without a seed.

`record` runs `loop.train` and notes, of every step, the batch that was used and the noise that
was added. `p_values` holds them against what the proof assumes: noise that is new, of the right
size and independent in every entry of every step of every run, and batches in which each example
is with probability q, independently of everything.

The noise of a step is what its privatised sum has beyond the clipped gradients of its batch, which
`Trainer.means` computes again. A gradient that is wrong in both is not seen here, but by the
canary of `bam.audit.canary`.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, PyTree
from scipy import signal

from bam.audit import checks
from bam.core import sampling
from bam.data import datasets
from bam.errors import InputError
from bam.training import loop
from bam.training.step import TrainState
from bam.training.trainer import Trainer


class Run(NamedTuple):
    """What the loop was seen to do, step by step: noise added, and examples in the batch.

    The noise has every leaf of a step in one row, over its planned deviation σ·S. `renewed` is the
    step after which secret randomness was drawn anew, 0 if never.
    """

    noise: Float[np.ndarray, "steps entries"]
    members: Bool[np.ndarray, "steps examples"]
    renewed: int = 0

    def parts(self) -> list["Run"]:
        """The run before and after its randomness was drawn anew; itself, if it never was."""
        cuts = [self.renewed] if self.renewed else []
        pieces = (np.split(x, cuts) for x in (self.noise, self.members))
        return [Run(*piece) for piece in zip(*pieces, strict=True)]


def record(trainer: Trainer, seed: int | None, cut: int = 0) -> Run:
    """Runs `loop.train`, stopped and resumed after step `cut` unless 0; returns what it did.

    The trainer is of a small model, as all noise is kept. InputError if it is not private, or
    its clip changes the noised mean (`finish`), from which the noise cannot be read.
    """
    plan = trainer.plan
    noise_std = plan.noise_multiplier * trainer.sensitivity
    if not noise_std > 0:
        raise InputError("only a private run has noise to audit")
    if trainer.clip.finish is not None:
        raise InputError("a clip with a `finish` of its own hides the noise from the audit")
    noise: list[np.ndarray] = []
    members: list[np.ndarray] = []

    def recording_step(
        state: TrainState, data: datasets.Split, batch: sampling.PaddedBatch
    ) -> TrainState:
        expected = sum_of_clipped(trainer, state, data, batch)
        state = trainer.take_step(state, data, batch)
        noised = plan.expected_batch_size * flat(state.private_grad)
        noise.append((noised - expected) / noise_std)
        members.append(np.zeros(plan.num_examples, bool))
        members[-1][np.asarray(batch.indices)[np.asarray(batch.mask)]] = True
        return state

    recorded = dataclasses.replace(trainer, audited_step=recording_step)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) if cut else None
        if cut:
            with contextlib.suppress(loop.StoppedError):
                loop.train(recorded, seed, workdir, should_stop=lambda: len(noise) == cut)
        loop.train(recorded, seed, workdir)
    return Run(np.array(noise), np.array(members), renewed=cut if seed is None else 0)


def audit(trainer: Trainer) -> dict[str, float]:
    """Three runs, of which the first has a seed, each cut in the middle and resumed: `p_values`."""
    cut = trainer.plan.num_steps // 2
    return p_values(trainer, [record(trainer, seed, cut) for seed in (0, None, None)])


def p_values(trainer: Trainer, runs: Sequence[Run]) -> dict[str, float]:
    """Holds recorded runs against the plan, alone and with each other.

    The runs are independent: at most one of them with a given seed. The p-values are those of
    `checks.noise_p_values` and `checks.batches_p_values`; see `checks.failures`.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda: trainer.init(0).params))
    runs = [part for run in runs for part in run.parts()]
    strategy = trainer.plan.mechanism.strategy  # of noise that is correlated, what is fresh
    fresh = [signal.lfilter(strategy, [1.0], run.noise, axis=0) for run in runs]
    noise_p_values = checks.noise_p_values(fresh, [leaf.size for leaf in leaves])
    return noise_p_values | checks.batches_p_values([run.members for run in runs], trainer.plan)


def flat(tree: PyTree) -> Float[np.ndarray, " entries"]:
    """All leaves one after the other, in float64 on the host."""
    return np.concatenate(
        [np.ravel(x).astype(float) for x in jax.tree.leaves(jax.device_get(tree))]
    )


def sum_of_clipped(
    trainer: Trainer, state: TrainState, data: datasets.Split, batch: sampling.PaddedBatch
) -> Float[np.ndarray, " entries"]:
    """The sum of a batch's clipped gradients, all rows less the padding, as `flat`; NOT PRIVATE."""
    num_padding = int(np.sum(~np.asarray(batch.mask)))
    rows, padding = (
        len(indices) * flat(trainer.means(state, data, indices)[0].clipped)
        for indices in (np.asarray(batch.indices), np.full(1, sampling.PADDING, np.int32))
    )
    return rows - num_padding * padding
