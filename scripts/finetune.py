"""Private training from scratch against private fine-tuning of weights from public classes.

python -m scripts.finetune --workdir=runs/finetune --out=runs/finetune/result

The classes that the config does not name are public: a network is trained on them without privacy.
On the private ones it then is trained from scratch, and from those weights with a new last layer:
that layer alone, with it normalisation layers and gains, and all parameters. The same command again
goes on where it was stopped. All have seeds: release none of these models.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, plotting, sweeps, tables
from bam.data import datasets
from bam.privacy.accounting import rounded_up
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
    "trained": lambda row: row["trained"],
    "parameters": lambda row: f"{row['num_params']:,}",
    "frozen": lambda row: f"{row['num_frozen']:,}",
    "ε": lambda row: rounded_up(row["epsilon"], ".3g"),
    "seeds": lambda row: str(row["num_seeds"]),
    "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
    **tables.gain("gain", lambda row: row["trained"] == FROM_SCRATCH),
}


def main() -> None:
    """Trains what is missing, then writes table and figure."""
    with console.one_line_errors():
        weights = public_weights()
        if weights is None:
            return
        groups = {
            trained: sweeps.of_seeds(trained.replace(", ", "_").replace(" ", "_"), config)
            for trained, config in configs(weights).items()
        }
        runs = {trained: found for trained, found in sweeps.run_missing(groups).items() if found}
        if not runs:
            return
        rows = [row(trained, found, runs.get(FROM_SCRATCH, {})) for trained, found in runs.items()]
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(Path(f"{out}.json"), {"public_steps": _PUBLIC_STEPS.value, "rows": rows})
        draw(runs, Path(f"{out}.png"))
    tables.show(COLUMNS, rows, keep=Path(f"{out}.md"))


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
    group = sweeps.of_seeds("public", config, num=1)
    if not sweeps.run_missing({"public": group})["public"]:
        return None
    workdir = Path(sweeps.WORKDIR.value)
    file = workdir / "public.safetensors"
    if not file.exists():
        [(folder, config)] = group.items()
        state = sweeps.last_state(loop.build(config), 0, workdir / folder)
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


def row(
    trained: str, runs: dict[int, sweeps.Run], from_scratch: dict[int, sweeps.Run]
) -> dict[str, Any]:
    """The facts of a set of runs, and their gain over those from scratch, paired by seed."""
    first = next(iter(runs.values())).summary
    found = sweeps.judged(runs, from_scratch)
    facts = ("method", "num_params", "num_frozen", "epsilon", "delta", "clip_norm", "num_steps")
    return {
        "trained": trained,
        **{key: first[key] for key in (*facts, "init_digest", "dataset", "device")},
        "num_seeds": len(runs),
        **{key: found[key] for key in ("accuracy", "gain")},
    }


def draw(runs: dict[str, dict[int, sweeps.Run]], path: Path) -> None:
    """Draws test accuracy over training, mean ± SD over seeds."""
    lines = []
    for trained, of_seeds in runs.items():
        metrics = [run.rows for run in of_seeds.values()]
        steps, values = plotting.over_seeds(metrics, "test_accuracy")
        lines.append(plotting.mean_line(trained, steps, values, STYLES[trained]))
    summary = next(iter(next(iter(runs.values())).values())).summary
    budget = ", ".join(rounded_up(summary[key], ".3g") for key in ("epsilon", "delta"))
    title = f"{summary['dataset']}, ({budget})-DP"
    plotting.panels([plotting.Panel("test accuracy", "step", lines, percent=True)], path, title)


if __name__ == "__main__":
    console.run(main, ["--config=configs/finetune.py"])
