"""Audits what the code that trains gives away: lower bounds on ε beside the claim.

bam audit --out=docs/audit.json --trials=4000

of every method, from thousands of short runs with and without a canary; and of whole runs, cut and
resumed, what the proof assumes of noise and batches. Or, of a run of your own, from training once:

bam audit --one_run --config=configs/digits.py:dp_sgd

adds canaries to the training data. It is for the audit alone: nothing of it may be released.
"""

import functools
import json
import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from bam import files, provenance
from bam.audit import canary, checks, one_run, whole_run
from bam.cli import console, tables
from bam.errors import InputError
from bam.files import JsonObject
from bam.training import config as base
from bam.training import devices, registry, trainer

_OUT = flags.DEFINE_string("out", "", "JSON file; settings that are in it are not run again")
_TRIALS = flags.DEFINE_integer("trials", 4000, "runs with, and as many without, the canary", 100)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam,bam_exact", "methods to audit")
_EPSILON = flags.DEFINE_float("epsilon", 4.0, "claimed ε, at δ = 1e-5")
_STEPS = flags.DEFINE_integer("steps", 4, "training steps per run", lower_bound=1)
_CONFIDENCE = flags.DEFINE_float("confidence", 0.95, "of every lower bound")
_ONE_RUN = flags.DEFINE_bool("one_run", False, "train --config once, with canaries; --out keeps it")
_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py:METHOD, of --one_run")
_CANARIES = flags.DEFINE_integer("canaries", 1000, "of --one_run, half of which take part", 20)
console.ensure(
    ("one_run", "config"),
    lambda one_run, config: one_run == (config is not None),
    "--one_run and --config=configs/NAME.py:METHOD belong together",
)
console.ensure(
    ("one_run", "out"), lambda one_run, out: one_run or out, "--out is required: the JSON file"
)

# N and expected batch size: every example in every step, and one in four.
SETTINGS = ((8, 8), (40, 10))
# Of the whole runs: N, expected batch size, steps.
WHOLE_RUN = (80, 20, 120)
# Of a plan, in a row of one run.
PLANNED = ("expected_batch_size", "sampling_prob", "num_steps", "noise_multiplier", "delta")
BOUNDS: tables.Columns = {
    "claimed ε": lambda row: f"{row['claimed_epsilon']:.2f}",
    "ε at least": lambda row: f"{row['empirical_epsilon_lower']:.2f}",
    "ε at least, any mechanism": lambda row: f"{row['empirical_epsilon_lower_any_mechanism']:.2f}",
}
COLUMNS: tables.Columns = {
    "method": lambda row: registry.label(row["method"]),
    "q": lambda row: f"{row['sampling_prob']:g}",
    **BOUNDS,
    "runs": lambda row: f"2 × {row['num_trials']}",
}
ONE_RUN_COLUMNS: tables.Columns = {
    "run": lambda row: f"{row['dataset']}, {row['model']}, {registry.label(row['method'])}",
    "canaries": lambda row: f"{row['num_canaries']} beside {row['num_examples']}",
    "q": lambda row: f"{row['sampling_prob']:.3g}",
    "T": lambda row: f"{row['num_steps']}",
    "right guesses": lambda row: f"{row['num_correct']} of {row['num_guesses']}",
    **BOUNDS,
    "test accuracy": lambda row: f"{row['test_accuracy']:.1%}",
}


def main() -> None:
    """Runs what is asked for and missing, keeping each result as it is had, and prints a table."""
    with console.one_line_errors():
        out = Path(_OUT.value) if _OUT.value else None
        rows = _kept(out) if out and out.exists() else []
        console.check_writable(_OUT.value)
        console.use_compilation_cache()
    if _ONE_RUN.value:
        audit_one_run(rows, out)
    elif out:
        with console.one_line_errors():
            audit_methods(rows, out)


def _kept(path: Path) -> list[JsonObject]:
    """The rows that an earlier command wrote."""
    try:
        rows: list[JsonObject] = json.loads(files.read_bytes(path))
    except ValueError:
        raise InputError(f"{path} is damaged: not JSON") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise InputError(f"{path} holds no results of an audit: choose another --out")
    return rows


def audit_methods(rows: list[JsonObject], out: Path) -> None:
    """Adds the settings that are missing."""
    for method in _METHODS.value:
        for num_examples, batch_size in SETTINGS:
            config = config_of(method, batch_size)
            wanted = {"method": method, "sampling_prob": batch_size / num_examples}
            wanted |= {"num_trials": _TRIALS.value, "num_steps": _STEPS.value}
            wanted |= {"target_epsilon": _EPSILON.value, "confidence": _CONFIDENCE.value}
            if not any(wanted.items() <= row.items() for row in rows):
                rows.append(run(config, num_examples, wanted))
                keep(rows, out)
    tables.show(COLUMNS, many_runs_rows(rows))


def audit_one_run(rows: list[JsonObject], out: Path | None) -> None:
    """Trains once, prints the bound, and puts it in the place of an earlier one of this config."""
    config = _CONFIG.value
    started = time.perf_counter()
    with console.one_line_errors():
        built = one_run.build(config, _CANARIES.value)
        plan = built.plan
        real = plan.num_examples - _CANARIES.value
        console.say(
            f"{config.method.name} on {built.dataset.name}: {real} examples and "
            f"{_CANARIES.value} canaries, half of which take part"
        )
        console.show(plan.describe())
        seen = one_run.run(built, config.seed, on_row=_print_row)
        bounds = one_run.bounds(seen, plan, _CONFIDENCE.value)
    which = {
        "kind": "one_run",
        "method": config.method.name,
        "dataset": built.dataset.name,
        "model": config.model.name,
    }
    row = which | {
        "num_params": built.num_params,
        "num_examples": real,
        "num_canaries": _CANARIES.value,
        "num_included": int(seen.included.sum()),
        **{key: getattr(plan, key) for key in PLANNED},
        "claimed_epsilon": plan.epsilon,
        "confidence": _CONFIDENCE.value,
        "num_guesses": bounds.num_guesses,
        "num_correct": bounds.num_correct,
        "empirical_epsilon_lower": bounds.epsilon_lower,
        "empirical_epsilon_lower_any_mechanism": bounds.epsilon_lower_any,
        "test_accuracy": seen.test_accuracy,
        "seed": config.seed,
        **provenance_row(started),
    }
    wrong = max(bounds.epsilon_lower, bounds.epsilon_lower_any) > plan.epsilon
    console.say(
        f"{bounds.num_correct} of {bounds.num_guesses} guesses are right: ε is at least "
        f"{bounds.epsilon_lower_any:.2f} at {_CONFIDENCE.value:.0%} confidence, and at least "
        f"{bounds.epsilon_lower:.2f} if the mechanism is a Gaussian with its batches; claimed "
        f"{plan.epsilon:.2f} at δ = {plan.delta:g}{'. THE CLAIM IS WRONG' if wrong else ''}"
    )
    if out:
        rows = [other for other in rows if not which.items() <= other.items()]
        keep([*rows, row], out)
    if wrong:
        sys.exit(1)


def provenance_row(started: float) -> JsonObject:
    """What a row says of the machine and of the time since `started`."""
    seconds = time.perf_counter() - started
    return {"device": devices.name(), "seconds": seconds, "versions": provenance.versions()}


def keep(rows: list[JsonObject], out: Path) -> None:
    """Writes all rows, and a table of each kind that there is beside them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(out, rows)
    if many := many_runs_rows(rows):
        files.write_text(out.with_suffix(".md"), tables.markdown(COLUMNS, many))
    if single := [row for row in rows if row.get("kind") == "one_run"]:
        path = out.with_name(f"{out.stem}_one_run.md")
        files.write_text(path, tables.markdown(ONE_RUN_COLUMNS, single))


def many_runs_rows(rows: list[JsonObject]) -> list[JsonObject]:
    """The rows that are not of one run; those of 0.1.0 have no kind."""
    return [row for row in rows if row.get("kind") != "one_run"]


def config_of(method: str, batch_size: int) -> ConfigDict:
    """A linear model on the canary's data, with views, so that they are audited too."""
    config = base.get_config(method)
    config.update({"num_steps": _STEPS.value, "epsilon": _EPSILON.value, "microbatch_size": 1})
    config.expected_batch_size = batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.learning_rate = 1e-3
    config.augment.views = 2
    return config


def run(config: ConfigDict, num_examples: int, wanted: JsonObject) -> JsonObject:
    """One setting: its scores, and what they say, beside `wanted`, the facts that identify it."""
    started = time.perf_counter()
    plan = trainer.build(config, canary.canary_dataset(num_examples)).plan
    present, absent = canary.scores(config, num_examples, wanted["num_trials"])
    bound = canary.lower_bound(
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
        "empirical_epsilon_lower": bound.epsilon_lower,
        "empirical_epsilon_lower_any_mechanism": bound.epsilon_lower_any,
        "false_positive_rate_upper": bound.false_positive_rate,
        "false_negative_rate_upper": bound.false_negative_rate,
        "whole_run_p_values": whole_run_p_values(wanted["method"]),
        **provenance_row(started),
    }
    failed = checks.failures(row["whole_run_p_values"])
    passed = f"NOT PASSED: {', '.join(failed)}" if failed else "noise and batches as planned"
    console.say(f"{row['method']} q = {row['sampling_prob']:g}: {bound.epsilon_lower:.2f} {passed}")
    return row


@functools.cache
def whole_run_p_values(method: str) -> dict[str, float]:
    """Of three runs of a method, cut and resumed, see `bam.audit.whole_run`."""
    num_examples, batch_size, num_steps = WHOLE_RUN
    config = config_of(method, batch_size)
    config.num_steps = num_steps
    dataset = canary.canary_dataset(num_examples, num_classes=10, num_features=36)
    return whole_run.audit(trainer.build(config, dataset))


def _print_row(row: JsonObject) -> None:
    console.say(f"step {row['step']:>6}  test accuracy {row['test_accuracy']:.2%}")


if __name__ == "__main__":
    console.run(main)
