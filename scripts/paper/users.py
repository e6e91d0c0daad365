"""What it takes to protect users with several examples: as users, or as examples.

python -m scripts.paper.users --config=configs/digits.py --workdir=runs/users \
  --out=docs/results/users/digits.json

Users are made up: the training images are dealt out at random, --group_size to each. DP-SGD on
users promises them (ε, δ), and so does DP-SGD on examples with the noise that it takes: by the
exact account of a group, and by what holds for any mechanism. One row promises ε to examples alone.
All take as many steps, with nearly the same q, and the config's settings: nothing is chosen by
accuracy.
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, sweeps, tables
from bam.privacy import accounting, groups
from bam.privacy.accounting import rounded_down, rounded_up
from bam.training import provenance, registry

_OUT = flags.DEFINE_string("out", "", "JSON file to write; its table goes beside it")
_EPSILONS = flags.DEFINE_list("epsilons", "3,8", "ε to promise, at the config's δ")
_GROUP_SIZE = flags.DEFINE_integer("group_size", 4, "examples of each user", 2)
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "out", "epsilons")

FIXED = {"epsilon", "delta", "accountant", "mechanism.name", "expected_batch_size", "num_steps"}
FIXED |= {f"dataset.{key}" for key in ("groups", "group_size", "holdout")}
TOLERANCE = 1e-3  # of the search for noise, whose ε takes seconds each
COLUMNS: tables.Columns = {
    "unit of DP-SGD": lambda row: row["what"],
    "ε of a user": lambda row: rounded_up(row["user_epsilon"], ".3g"),
    "ε of an example": lambda row: rounded_up(row["epsilon"], ".3g"),
    "σ": lambda row: rounded_down(row["noise_multiplier"], ".4g"),
    "l": lambda row: f"{row['expected_batch_size']}",
    "runs": lambda row: f"{len(row['accuracies'])}",
    "test accuracy, %": lambda row: tables.mean_sd(row["accuracies"], ".1f"),
}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        console.check_writable(_OUT.value)
        base = sweeps.method_config("dp_sgd", FIXED)
        base.eval.every = 0
        num_examples = len(registry.make_dataset(base.dataset, base.features).train.labels)
        base.num_steps = base.num_epochs * (num_examples // base.expected_batch_size)
        ids = _deal(num_examples, _GROUP_SIZE.value)
        epsilons = [float(epsilon) for epsilon in _EPSILONS.value]
        found = {epsilon: _configs(base, epsilon, num_examples, ids) for epsilon in epsilons}
        runs = sweeps.run_missing(
            {
                (epsilon, what): sweeps.of_seeds(f"epsilon{epsilon:g}/{i}", config)
                for epsilon, configs in found.items()
                for i, (what, config) in enumerate(configs.items())
            }
        )
        if any(len(of_seeds) < sweeps.NUM_SEEDS.value for of_seeds in runs.values()):
            return
        rows = [_row(what, list(of_seeds.values())) for (_, what), of_seeds in runs.items()]
        out = Path(_OUT.value)
        settings = {"group_size": _GROUP_SIZE.value, "num_users": len(np.unique(np.load(ids)))}
        files.write_json(out, settings | {"rows": rows, "versions": provenance.versions()})
    tables.show(COLUMNS, rows, keep=out.with_suffix(".md"))


def _deal(num_examples: int, group_size: int) -> Path:
    """A file of ids: every user gets so many rows, drawn at random, and the last what is left."""
    ids = np.empty(num_examples, np.int64)
    ids[np.random.default_rng(0).permutation(num_examples)] = np.arange(num_examples) // group_size
    path = Path(sweeps.WORKDIR.value) / f"ids{group_size}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, ids)
    return path


def _configs(
    base: ConfigDict, epsilon: float, num_examples: int, ids: Path
) -> dict[str, ConfigDict]:
    """What is compared at an ε: rows of the table, and their configs."""
    size, batch_size = _GROUP_SIZE.value, base.expected_batch_size
    mechanism = {"sampling_prob": batch_size / num_examples, "num_steps": base.num_steps}

    def group(sigma: float) -> float:
        return groups.epsilon_of_group(
            noise_multiplier=sigma, delta=base.delta, group_size=size, **mechanism
        )

    alone = accounting.noise_multiplier(target_epsilon=epsilon, delta=base.delta, **mechanism)
    sigma = accounting.least_noise(group, epsilon, size * alone, TOLERANCE)
    exact = accounting.epsilon(noise_multiplier=sigma, delta=base.delta, **mechanism)
    of_any = groups.of_example(epsilon, base.delta, size)
    users = _changed(base, epsilon, base.delta)
    users.expected_batch_size = max(1, round(batch_size / size))
    users.dataset.update({"groups": str(ids), "group_size": size})
    return {
        "a user": users,
        "an example, exact account of a group": _changed(base, exact, base.delta),
        "an example, account for any mechanism": _changed(base, *of_any),
        "an example, which alone is promised ε": _changed(base, epsilon, base.delta),
    }


def _changed(base: ConfigDict, epsilon: float, delta: float) -> ConfigDict:
    config = base.copy_and_resolve_references()
    config.update({"epsilon": epsilon, "delta": delta})
    return config


def _row(what: str, runs: list[sweeps.Run]) -> dict[str, Any]:
    """A row of the table; a user's ε is that of the run's own noise, at the δ that is promised."""
    first = runs[0].summary
    facts = ("epsilon", "delta", "noise_multiplier", "sampling_prob", "num_steps", "unit")
    row = {"what": what, "user_epsilon": first["epsilon"]}
    row |= {key: first[key] for key in (*facts, "expected_batch_size", "num_examples")}
    if first["unit"] == "example":
        mechanism = {k: first[k] for k in ("noise_multiplier", "sampling_prob", "num_steps")}
        delta = max(first["delta"], float(sweeps.method_config("dp_sgd", FIXED).delta))
        row["user_epsilon"] = groups.epsilon_of_group(
            delta=delta, group_size=_GROUP_SIZE.value, **mechanism
        )
    return row | {"accuracies": [100 * run.summary["test_accuracy"] for run in runs]}


if __name__ == "__main__":
    console.run(main, defaults=["--num_seeds=5"])
