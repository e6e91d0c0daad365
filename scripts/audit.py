"""Audits the training step of every method: lower bounds on ε beside the claim.

python -m scripts.audit --out=docs/audit.json --trials=4000
"""

import json
import time
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from bam import experiment, plotting, report
from bam.privacy import audit
from configs import base
from scripts import cli, tables

_OUT = flags.DEFINE_string("out", "", "JSON file; settings that are in it are not run again")
_TRIALS = flags.DEFINE_integer("trials", 4000, "runs with, and as many without, the canary", 100)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam,bam_exact", "methods to audit")
_EPSILON = flags.DEFINE_float("epsilon", 4.0, "claimed ε, at δ = 1e-5")
_STEPS = flags.DEFINE_integer("steps", 4, "training steps per run", lower_bound=1)
_CONFIDENCE = flags.DEFINE_float("confidence", 0.95, "of every lower bound")

# N and expected batch size: every example in every step, and one in four.
SETTINGS = ((8, 8), (40, 10))
COLUMNS = ("method", "q", "claimed ε", "ε at least", "ε at least, any mechanism", "runs")


def main() -> None:
    """Runs the settings that are missing, keeping each as it is done, and prints the table."""
    with cli.one_line_errors():
        if not _OUT.value:
            raise ValueError("--out is required: the JSON file to write")
        out = Path(_OUT.value)
        rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
        out.parent.mkdir(parents=True, exist_ok=True)
        cli.use_compilation_cache()
        for method in _METHODS.value:
            for num_examples, batch_size in SETTINGS:
                config = config_of(method, batch_size)
                wanted = {"method": method, "sampling_prob": batch_size / num_examples}
                wanted |= {"num_trials": _TRIALS.value, "num_steps": _STEPS.value}
                wanted |= {"target_epsilon": _EPSILON.value, "confidence": _CONFIDENCE.value}
                if not any(wanted.items() <= row.items() for row in rows):
                    rows.append(run(config, num_examples, wanted))
                    report.write_json(out, rows)
                    report.write_text(out.with_suffix(".md"), markdown(rows))
    Console().print(as_table(rows))


def config_of(method: str, batch_size: int) -> ConfigDict:
    """A linear model on the canary's data, with views, so that they are audited too."""
    config = base.get_config(method)
    config.update({"num_steps": _STEPS.value, "epsilon": _EPSILON.value, "microbatch_size": 1})
    config.expected_batch_size = batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.learning_rate = 1e-3
    config.augment.views = 2
    return config


def run(config: ConfigDict, num_examples: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """One setting: its scores, and what they say.

    Args:
      config: from `config_of`.
      num_examples: N.
      wanted: the facts that identify the setting, kept in the row.

    Returns:
      A JSON object.
    """
    started = time.perf_counter()
    plan = experiment.build(config, audit.canary_dataset(num_examples)).plan
    present, absent = audit.scores(config, num_examples, wanted["num_trials"])
    found = audit.lower_bound(
        present,
        absent,
        sampling_prob=plan.sampling_prob,
        num_steps=plan.num_steps,
        delta=plan.delta,
        confidence=wanted["confidence"],
    )
    row = wanted | {
        "claimed_epsilon": plan.epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "empirical_epsilon_lower": found.epsilon_lower,
        "empirical_epsilon_lower_any_mechanism": found.epsilon_lower_any,
        "false_positive_rate_upper": found.false_positive_rate,
        "false_negative_rate_upper": found.false_negative_rate,
        "noise_p_values": audit.noise_p_values(config, num_examples, 200),
        "device": report.device_name(),
        "seconds": time.perf_counter() - started,
        "versions": report.versions(),
    }
    print(f"{row['method']} q = {row['sampling_prob']:g}: {found.epsilon_lower:.2f}", flush=True)
    return row


def as_cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `COLUMNS`."""
    return [
        plotting.LABELS.get(row["method"], row["method"]),
        f"{row['sampling_prob']:g}",
        f"{row['claimed_epsilon']:.2f}",
        f"{row['empirical_epsilon_lower']:.2f}",
        f"{row['empirical_epsilon_lower_any_mechanism']:.2f}",
        f"2 × {row['num_trials']}",
    ]


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The audit as a table for the terminal."""
    return tables.terminal(COLUMNS, [as_cells(row) for row in rows])


def markdown(rows: list[dict[str, Any]]) -> str:
    """The audit as a table for documents."""
    return tables.markdown(COLUMNS, [as_cells(row) for row in rows])


if __name__ == "__main__":
    cli.run(main)
