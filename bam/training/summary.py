"""The summary of a finished run: the fields of `summary.json`, which a release repeats."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from bam.data import datasets
from bam.files import JsonObject
from bam.models import layers
from bam.models.figures import NAMES
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
    """Returns the fields of `summary.json` for a finished run.

    ε and C are None without privacy.

    Args:
      trainer: the trainer of the run.
      seed: the seed of the run.
      last_row: the last row of its metrics.
      outputs: the outputs for the test images; None leaves the loss's figures out.
      processes: the processes that took its steps, from `bam.privacy.ledger.read_processes`. The
        device, versions and commit beside them belong to the process that ended the run.
    """
    pixels, images = trainer.normalisation, trainer.dataset.train.images
    raw = getattr(trainer.dataset, "mapped_from", None) or images
    classes = [str(name) for name in trainer.dataset.classes]
    return {
        "method": trainer.config.method.name,
        "dataset": trainer.dataset.name,
        "num_classes": trainer.dataset.num_classes,
        "classes": classes if len(classes) == trainer.dataset.num_classes else [],
        "preprocessing": getattr(trainer.dataset, "preprocessing", None),
        "image_shape": list(images.shape[-3:]),
        # Of an image as the data set has it, before a map to features.
        "raw_shape": list(raw.shape[-3:]),
        "raw_dtype": np.dtype(raw.dtype).name,
        "mean": trainer.dataset.mean.tolist(),
        "std": trainer.dataset.std.tolist(),
        "loss": trainer.config.loss.name,
        "features": trainer.config.features.name,
        "features_digest": trainer.features_digest,
        # The last two fields are the origin of the others, which may be a path of the user's.
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
        # A loss without an accuracy, and a run without an evaluation, have the key too.
        **{"test_accuracy": None}
        | {key: value for key, value in last_row.items() if key.startswith("test_")},
        **loss_figures(trainer, outputs),
        "seconds": last_row["seconds"],
        "device": devices.name(),
        "num_devices": trainer.num_devices,
        "num_processes": jax.process_count(),
        "versions": versions(),
        "commit": git_commit(),
    }


def loss_figures(trainer: Trainer, outputs: np.ndarray | None) -> JsonObject:
    """Returns the loss's figures of the test outputs, under `figures`.

    They are None if an output is not finite. {} without outputs, or if the loss has no figures.
    """
    figures = trainer.criterion.figures
    if figures is None or outputs is None:
        return {}
    if not np.isfinite(outputs).all():
        return {"figures": None}
    # Targets were scaled for training; a reader wants the units of the table.
    in_units = functools.partial(datasets.in_units, trainer.dataset)
    labels, names = np.asarray(trainer.dataset.test.labels), trainer.dataset.classes
    ids = getattr(trainer.dataset, "test_users", None)
    # A loss of the user's own may have figures that know no users.
    users = {} if ids is None or figures not in NAMES else {"users": ids}
    return figures(in_units(outputs), in_units(labels), names, **users)
