"""The figures of a run's weights: on its test split, and NOT PRIVATE ones on its training rows."""

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import PyTree

from bam import waits
from bam.core import slots
from bam.core.pytree import Params
from bam.core.slots import Share
from bam.data import datasets
from bam.models import finetune, lora
from bam.privacy.gradient_norms import gradient_norms as norms_of_state
from bam.training import devices
from bam.training import step as steps
from bam.training.step import TrainState
from bam.training.trainer import Trainer

LARGE_IMAGE = 64 * 64  # pixels from which on fewer than 1000 images are evaluated at once


def evaluate(trainer: Trainer, params: Params) -> dict[str, float]:
    """Returns the mean `test_loss`, the `test_accuracy` and the loss's metrics on the test split.

    The accuracy is in [0, 1]. An image whose loss is not finite counts as wrong; then the mean loss
    and the metrics are not finite either.
    """
    return evaluate_outputs(trainer, params)[0]


def images_at_once(trainer: Trainer, params: Params) -> int:
    """Returns the number of test images to evaluate at once, which the memory decides once."""
    images, labels = trainer.dataset.test
    # Fewer at once if images are large, because their activations are in memory together.
    size = max(1, min(1000, 1000 * LARGE_IMAGE // math.prod(images.shape[1:3])))
    size = trainer.programs.fitting.get(steps.score_images, size)
    while size > 1 and steps.score_images not in trainer.programs.fitting:
        rows = devices.share_rows((images[:size], labels[:size]), trainer.mesh)
        needed = devices.needs(trainer.score_images, params, *rows)
        if needed is None or needed.fits:
            break
        size //= 2
    trainer.programs.fitting[steps.score_images] = size
    return size


def evaluate_outputs(
    trainer: Trainer, params: Params, log: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, float], np.ndarray]:
    """Returns the figures of `evaluate`, and the network's outputs for the test split."""
    images, labels = trainer.dataset.test
    totals, outputs, criterion = np.zeros(2), [], trainer.criterion
    with waits.awaited(log, f"evaluating {len(labels):,} test images") as wait:
        chunk_size = images_at_once(trainer, params)
        for start in range(0, len(labels), chunk_size):
            wait.share = start / len(labels)
            chunk = slice(start, start + chunk_size)
            rows = devices.share_rows((images[chunk], labels[chunk]), trainer.mesh)
            *sums, output = trainer.score_images(params, *rows)
            totals += np.asarray(sums)
            outputs.append(np.asarray(output))
    # Sums over chunks, so that no chunk counts more than another.
    accuracy, loss = (totals / len(labels)).tolist()
    predicted, diverged = np.concatenate(outputs), not math.isfinite(loss)
    figures = {"test_accuracy": accuracy} if criterion.right else {}
    if criterion.metrics:
        # The metrics of zeros give their names. scikit-learn would refuse NaN, so the values of a
        # diverged run are NaN without a call on its outputs.
        defined = np.zeros_like(predicted) if diverged else predicted
        in_units = functools.partial(datasets.in_units, trainer.dataset)
        metrics = criterion.metrics(in_units(defined), in_units(np.asarray(labels)))
        figures |= dict.fromkeys(metrics, math.nan) if diverged else metrics
    return figures | {"test_loss": loss}, predicted


def not_private(trainer: Trainer, state: TrainState, rows: PyTree) -> dict[str, float]:
    """Returns the clipping bias and other diagnostics of training rows. NOT PRIVATE.

    The names are those of `trainer.diagnose` and `num_nonfinite`, after `not_private/`.
    """
    figures = trainer.diagnose(state, rows)
    labelled = {f"not_private/{k}": float(v) for k, v in figures.items()}
    return labelled | {"not_private/num_nonfinite": float(state.private.num_nonfinite)}


def gradient_norms(
    trainer: Trainer, state: TrainState, *, of_all_steps: bool = False
) -> dict[str, Share]:
    """Returns the shares of gradients by their norm in the last step, or {} without slots.

    They are those of `bam.privacy.gradient_norms`, named by `slots.as_shares`. ε covers them.
    """
    if not trainer.plan.private:
        return {}
    norms = norms_of_state(trainer.plan, state.private, of_all_steps=of_all_steps)
    return slots.as_shares(norms) if norms else {}


def as_metrics(shares: dict[str, Share]) -> dict[str, float]:
    """Shares as the figures of a row, after `private/`, with the ends of their intervals."""
    return {
        f"private/{name}{end}": x
        for name, share in shares.items()
        for end, x in zip(("", "_low", "_high"), share, strict=True)
    }


def diagnosed_rows(trainer: Trainer) -> PyTree:
    """Returns the evenly spaced training rows of the diagnostics.

    They are the same each time, so that the figures of a run are comparable over its steps.
    """
    num_examples = len(trainer.dataset.train.labels)
    num = min(trainer.config.diagnostics.num_examples, num_examples)
    return trainer.rows(np.linspace(0, num_examples - 1, num).astype(np.int32))


def whole_model(state: TrainState) -> Params:
    """Returns the weights to release.

    They are averaged, with the frozen ones, and low-rank factors are folded in.
    """
    return lora.fold(finetune.merge(state.averaged, state.frozen))
