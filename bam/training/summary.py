"""What a finished run says of itself: the facts in `summary.json`, which a release states again."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from bam.data import datasets
from bam.files import JsonObject
from bam.models import layers
from bam.provenance import git_commit, versions
from bam.training import devices
from bam.training.trainer import Trainer


def summarize(
    trainer: Trainer,
    seed: int | None,
    last_row: JsonObject,
    outputs: np.ndarray | None = None,
    processes: Sequence[JsonObject] = (),
) -> JsonObject:
    """The facts of a finished run as `summary.json` keeps them; ε and C are None if not private.

    Args:
      trainer: of the run.
      seed: of the run.
      last_row: of its metrics.
      outputs: of the test images; None: no figures are made of them.
      processes: that took its steps, as `bam.privacy.ledger.read_processes` gives them. The device,
        versions and commit beside them are those of the process that ended the run.
    """
    pixels = trainer.normalisation  # without the folder that says so
    classes = [str(name) for name in trainer.dataset.classes]
    return {
        "method": trainer.config.method.name,
        "dataset": trainer.dataset.name,
        "num_classes": trainer.dataset.num_classes,
        "classes": classes if len(classes) == trainer.dataset.num_classes else [],
        "preprocessing": getattr(trainer.dataset, "preprocessing", None),
        "image_shape": list(trainer.dataset.train.images.shape[-3:]),
        "mean": trainer.dataset.mean.tolist(),
        "std": trainer.dataset.std.tolist(),
        "loss": trainer.config.loss.name,
        "features": trainer.config.features.name,
        "features_digest": trainer.features_digest,
        "normalisation": pixels and {x: pixels._asdict()[x] for x in pixels._fields[:4]},
        "model": trainer.config.model.name,
        "num_params": trainer.num_params,
        "num_frozen": trainer.num_frozen,
        "init_digest": trainer.weights.digest,
        **{k: trainer.config[k] for k in ("microbatch_size", "precision")},
        "convolution": layers.formulation(trainer.config.convolution),
        **trainer.record,
        "clip": trainer.config.clip.name,
        "seed": seed,
        "noise_key": "operating system" if seed is None else "seed",
        "noise": trainer.plan.mechanism.noise,
        "sampling": trainer.plan.mechanism.sampling,
        "steps_taken": last_row["step"],
        "steps_begun": last_row["steps_begun"],
        "processes": list(processes),
        **{"test_accuracy": None}
        | {key: value for key, value in last_row.items() if key.startswith("test_")},
        **judged_figures(trainer, outputs),
        "seconds": last_row["seconds"],
        "device": devices.name(),
        "num_devices": trainer.mesh.size if trainer.mesh else 1,
        "num_processes": jax.process_count(),
        "versions": versions(),
        "commit": git_commit(),
    }


def judged_figures(trainer: Trainer, outputs: np.ndarray | None) -> JsonObject:
    """What the loss's figures say; None in their place if an output is not finite."""
    figures = trainer.criterion.figures
    if figures is None or outputs is None:
        return {}
    if not np.isfinite(outputs).all():
        return {"figures": None}
    in_units = functools.partial(datasets.in_units, trainer.dataset)
    labels, names = np.asarray(trainer.dataset.test.labels), trainer.dataset.classes
    return figures(in_units(outputs), in_units(labels), names)
