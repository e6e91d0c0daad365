"""What it takes to protect users with several examples: as users, or as examples.

python -m scripts.paper.users --config=configs/digits.py --workdir=runs/users \
  --out=docs/results/users/digits

Users are made up: the training images are dealt out at random, --group_size to each. DP-SGD on
users promises them (ε, δ), and so does DP-SGD on examples with the noise that it takes: by the
exact account of a group, and by what holds for any mechanism. One row promises ε to examples alone.
All take as many steps, with nearly the same q, and the config's settings: nothing is chosen by
accuracy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, sweeps, tables
from bam.cli.study import Study, carry_out
from bam.privacy import accounting, groups
from bam.privacy.accounting import rounded_down, rounded_up
from bam.training import loading

_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
_EPSILONS = flags.DEFINE_list("epsilons", "3,8", "ε to promise, at the config's δ")
_GROUP_SIZE = flags.DEFINE_integer("group_size", 4, "examples of each user", 2)
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "out", "epsilons")

FIXED = {"epsilon", "delta", "accountant", "mechanism.name", "expected_batch_size", "num_steps"}
FIXED |= {f"dataset.{key}" for key in ("groups", "group_size", "holdout")}
TOLERANCE = 1e-3  # of the search for noise, whose ε takes seconds each
COLUMNS: tables.Columns = {
    "ε of a user": lambda row: rounded_up(row["user_epsilon"], ".3g"),
    "σ": lambda row: rounded_down(row["noise_multiplier"], ".4g"),
    "l": lambda row: f"{row['expected_batch_size']}",
}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        base = sweeps.method_config("dp_sgd", FIXED)
        base.eval.every = 0
        num_examples = len(loading.make_dataset(base.dataset, base.features).train.labels)
        base.num_steps = base.num_epochs * (num_examples // base.expected_batch_size)
        ids = _deal(num_examples, _GROUP_SIZE.value)
        configs = {
            f"ε={epsilon}: {unit}": config
            for epsilon in _EPSILONS.value
            for unit, config in _configs(base, float(epsilon), num_examples, ids).items()
        }

        def user_epsilon(label: str, runs: Sequence[sweeps.Run]) -> dict[str, float]:
            """A user's ε at the base's δ: of the run's own noise, whatever the run promises."""
            summary = runs[0].summary
            if summary["unit"] != "example":
                return {"user_epsilon": summary["epsilon"]}
            mechanism = {k: summary[k] for k in ("noise_multiplier", "sampling_prob", "num_steps")}
            delta, size = max(summary["delta"], float(base.delta)), _GROUP_SIZE.value
            of_user = groups.epsilon_of_group(delta=delta, group_size=size, **mechanism)
            return {"user_epsilon": of_user}

        study = Study(
            configs, lambda label: f"{label.split(':')[0]}: a user", COLUMNS, user_epsilon
        )
        carry_out(study, Path(_OUT.value))


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
    """What is compared at an ε: the unit of DP-SGD, and the config."""
    size, batch_size = _GROUP_SIZE.value, base.expected_batch_size
    mechanism: dict[str, Any] = {
        "sampling_prob": batch_size / num_examples,
        "num_steps": base.num_steps,
        "delta": base.delta,
    }

    def group(sigma: float) -> float:
        return groups.epsilon_of_group(noise_multiplier=sigma, group_size=size, **mechanism)

    def changed(epsilon: float, delta: float) -> ConfigDict:
        config = base.copy_and_resolve_references()
        config.update({"epsilon": epsilon, "delta": delta})
        return config

    alone = accounting.noise_multiplier(target_epsilon=epsilon, **mechanism)
    sigma = accounting.least_noise(group, epsilon, size * alone, TOLERANCE)
    exact = accounting.epsilon(noise_multiplier=sigma, **mechanism)
    users = changed(epsilon, base.delta)
    users.expected_batch_size = max(1, round(batch_size / size))
    users.dataset.update({"groups": str(ids), "group_size": size})
    return {
        "a user": users,
        "an example, exact account of a group": changed(exact, base.delta),
        "an example, account for any mechanism": changed(
            *groups.of_example(epsilon, base.delta, size)
        ),
        "an example, which alone is promised ε": changed(epsilon, base.delta),
    }


if __name__ == "__main__":
    console.run(main, defaults=["--num_seeds=5"])
