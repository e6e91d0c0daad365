"""Private training from scratch against private fine-tuning of weights from public classes.

python -m scripts.finetune --workdir=runs/finetune --out=runs/finetune/result

The classes that the config does not name are public: a network is trained on them without privacy.
On the private ones it then is trained from scratch, and from those weights with a new last layer:
that layer alone, with it normalisation layers and gains, and all parameters. The same command again
goes on where it was stopped. All have seeds: release none of these models.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, sweeps, tables
from bam.data import datasets
from bam.privacy.accounting import rounded_up
from bam.sweep import plot
from bam.sweep.comparison import Runs, Study
from bam.sweep.runs import last_state, with_seeds
from bam.training import finetune, loop, registry
from configs.finetune import TRAINED

_OUT = flags.DEFINE_string("out", "", "path without extension: .json, .md and .png are written")
_METHOD = flags.DEFINE_enum(
    "method",
    "dp_sgd",
    [name for name in registry.METHODS if registry.is_private(name)],
    "of fine-tuning",
)
_HEAD = flags.DEFINE_string("head", "Dense_0", "name of the last layer, which begins afresh")
_PUBLIC_STEPS = flags.DEFINE_integer("public_steps", 1000, "of training on the public classes", 1)
flags.adopt_module_key_flags(sweeps)
console.require("workdir", "out")

FROM_SCRATCH = "all, from scratch"
# What is trained -> how it is drawn.
STYLES: dict[str, dict[str, Any]] = {
    FROM_SCRATCH: {"color": "#000000", "linestyle": "-"},
    "last layer": {"color": "#E69F00", "linestyle": "--"},
    "normalisation, gains and last layer": {"color": "#0072B2", "linestyle": "-."},
    "all": {"color": "#CC79A7", "linestyle": (0, (5, 1))},
}
COLUMNS: tables.Columns = {
    "parameters": lambda row: f"{row['num_params']:,}",
    "frozen": lambda row: f"{row['num_frozen']:,}",
}


def main() -> None:
    """Trains what is missing, then writes table and figure."""
    with console.one_line_errors():
        weights = public_weights()
        if weights is None:
            raise SystemExit(console.STOPPED)
        study = Study(configs(weights), lambda label: FROM_SCRATCH, COLUMNS)
        rows, found = sweeps.carry_out(study, Path(_OUT.value))
        draw(rows, found, Path(f"{_OUT.value}.png"))


def public_weights() -> Path | None:
    """The file of the weights that the public classes gave; None if training was stopped."""
    config = sweeps.method_config("non_private", {"init_from", "init_fresh", "trainable"})
    of = config.dataset.of
    if of not in datasets.DATASETS:
        raise ValueError(f"dataset.of {of!r} is not one of {', '.join(datasets.DATASETS)}")
    private = set(config.dataset.classes)
    config.dataset.classes = tuple(sorted(set(range(datasets.DATASETS[of].num_classes)) - private))
    config.num_steps = _PUBLIC_STEPS.value
    config.checkpoint.every = config.num_steps
    group = with_seeds("public", config, num=1)
    if not sweeps.run_missing({"public": group})["public"]:
        return None
    workdir = Path(sweeps.WORKDIR.value)
    file = workdir / "public.safetensors"
    if not file.exists():
        [(folder, config)] = group.items()
        state = last_state(loop.build(config), 0, workdir / folder)
        assert state is not None  # that checkpoint was just made
        finetune.save(loop.whole_model(state), file)
    return file


def configs(weights: Path) -> dict[str, ConfigDict]:
    """What is trained -> the config of it; but for that they are the same."""
    found = {}
    for trained in STYLES:
        config = sweeps.method_config(_METHOD.value, {"init_from", "init_fresh", "trainable"})
        if trained != FROM_SCRATCH:
            config.init_from, config.init_fresh = str(weights), _HEAD.value
            config.trainable = TRAINED[trained].format(head=_HEAD.value)
        found[trained] = config
    return found


def draw(rows: Sequence[Mapping[str, Any]], found: Runs, path: Path) -> None:
    """Draws test accuracy over training, mean ± SD over seeds."""
    lines = []
    for trained, of_seeds in found.items():
        metrics = [run.rows for run in of_seeds.values()]
        steps, values = plot.over_seeds(metrics, "test_accuracy")
        lines.append(plot.mean_line(trained, steps, values, STYLES[trained]))
    budget = ", ".join(rounded_up(rows[0][key], ".3g") for key in ("epsilon", "delta"))
    title = f"{rows[0]['dataset']}, ({budget})-DP"
    plot.panels([plot.Panel("test accuracy", "step", lines, percent=True)], path, title)


if __name__ == "__main__":
    console.run(main, ["--config=configs/finetune.py"])
