"""Audits what the code that trains gives away: lower bounds on ε beside the claim."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam import files, provenance, tables, waits
from bam.audit import canary, checks, one_run, whole_run
from bam.cli import console, screen
from bam.errors import InputError
from bam.files import JsonObject
from bam.training import config as base
from bam.training import devices, methods, trainer

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
    "method": lambda row: methods.label(row["method"]),
    "q": lambda row: f"{row['sampling_prob']:g}",
    **BOUNDS,
    "runs": lambda row: f"2 × {row['num_trials']}",
}
ONE_RUN_COLUMNS: tables.Columns = {
    "run": lambda row: f"{row['dataset']}, {row['model']}, {methods.label(row['method'])}",
    "canaries": lambda row: f"{row['num_canaries']} beside {row['num_examples']}",
    "q": lambda row: f"{row['sampling_prob']:.3g}",
    "T": lambda row: f"{row['num_steps']}",
    "right guesses": lambda row: f"{row['num_correct']} of {row['num_guesses']}",
    **BOUNDS,
    "test accuracy": lambda row: f"{row['test_accuracy']:.1%}",
}


def main(argv: Sequence[str]) -> int:
    """`bam audit` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("audit", argv, audit)


def audit(given: flags.FlagValues) -> int:
    """Runs what is asked for and missing, keeping each result as it is had, and prints a table."""
    out = Path(given.out) if given.out else None
    rows = _kept(out) if out and out.exists() else []
    console.check_writable(given.out)
    console.use_compilation_cache()
    if given.one_run:
        return audit_one_run(given, rows, out)
    if out:
        audit_methods(given, rows, out)
    return 0


def _kept(path: Path) -> list[JsonObject]:
    """The rows that an earlier command wrote."""
    try:
        rows: list[JsonObject] = json.loads(files.read_bytes(path))
    except ValueError:
        raise InputError(f"{path} is damaged: not JSON") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise InputError(f"{path} holds no results of an audit: choose another --out")
    return rows


def audit_methods(given: flags.FlagValues, rows: list[JsonObject], out: Path) -> None:
    """Adds the settings that are missing."""
    for method in given.methods:
        p_values: dict[str, float] = {}  # of a method's whole runs, once for its settings
        for num_examples, batch_size in SETTINGS:
            config = config_of(method, batch_size, given.steps, given.epsilon)
            wanted = {"method": method, "sampling_prob": batch_size / num_examples}
            wanted |= {"num_trials": given.trials, "num_steps": given.steps}
            wanted |= {"target_epsilon": given.epsilon, "confidence": given.confidence}
            if not any(wanted.items() <= row.items() for row in rows):
                p_values = p_values or whole_run_p_values(method, given.epsilon)
                rows.append(run(config, num_examples, wanted, p_values))
                keep(rows, out)
    screen.show(COLUMNS, many_runs_rows(rows))


def audit_one_run(given: flags.FlagValues, rows: list[JsonObject], out: Path | None) -> int:
    """Trains once, prints the bound, and puts it in the place of an earlier one of this config."""
    config = given.config
    started = time.perf_counter()
    built = one_run.build(config, given.canaries)
    plan = built.plan
    real = plan.num_examples - given.canaries
    console.say(
        f"{config.method.name} on {built.dataset.name}: {real} examples and "
        f"{given.canaries} canaries, half of which take part"
    )
    console.show(built.describe_plan())
    seen = one_run.run(built, given.canaries, config.seed, on_row=_print_row, log=console.show)
    with waits.awaited(console.show, "the least ε that fits the guesses"):
        bounds = one_run.bounds(seen, plan, given.confidence)
    which = {
        "kind": "one_run",
        "method": config.method.name,
        "dataset": built.dataset.name,
        "model": config.model.name,
    }
    row = which | {
        "num_params": built.num_params,
        "num_examples": real,
        "num_canaries": given.canaries,
        "num_included": int(seen.included.sum()),
        **{key: getattr(plan, key) for key in PLANNED},
        "claimed_epsilon": plan.epsilon,
        "confidence": given.confidence,
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
        f"{bounds.epsilon_lower_any:.2f} at {given.confidence:.0%} confidence, and at least "
        f"{bounds.epsilon_lower:.2f} if the mechanism is a Gaussian with its batches; claimed "
        f"{plan.epsilon:.2f} at δ = {plan.delta:g}{'. THE CLAIM IS WRONG' if wrong else ''}"
    )
    if out:
        rows = [other for other in rows if not which.items() <= other.items()]
        keep([*rows, row], out)
    return console.FAULT if wrong else 0


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
    """The rows that are not of one run; these have no kind."""
    return [row for row in rows if row.get("kind") != "one_run"]


def config_of(method: str, batch_size: int, num_steps: int, epsilon: float) -> ConfigDict:
    """A linear model on the canary's data, with views, so that they are audited too."""
    config = base.get_config(method)
    config.update({"num_steps": num_steps, "epsilon": epsilon, "microbatch_size": 1})
    config.expected_batch_size = batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.learning_rate = 1e-3
    config.augment.views = 2
    return config


def run(
    config: ConfigDict, num_examples: int, wanted: JsonObject, p_values: dict[str, float]
) -> JsonObject:
    """One setting: its scores, and what they say, beside `wanted`, the facts that identify it."""
    started = time.perf_counter()
    plan = trainer.build(config, canary.canary_dataset(num_examples)).plan
    present, absent = canary.scores(config, num_examples, wanted["num_trials"], log=console.show)
    with waits.awaited(console.show, "the least ε that fits their scores"):
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
        "whole_run_p_values": p_values,
        **provenance_row(started),
    }
    failed = checks.failures(row["whole_run_p_values"])
    passed = f"NOT PASSED: {', '.join(failed)}" if failed else "noise and batches are as planned"
    console.say(
        f"{row['method']}, q = {row['sampling_prob']:g}: ε is at least {bound.epsilon_lower:.2f}; "
        f"{passed}"
    )
    return row


def whole_run_p_values(method: str, epsilon: float) -> dict[str, float]:
    """Of three runs of a method, cut and resumed, see `bam.audit.whole_run`."""
    num_examples, batch_size, num_steps = WHOLE_RUN
    config = config_of(method, batch_size, num_steps, epsilon)
    dataset = canary.canary_dataset(num_examples, num_classes=10, num_features=36)
    with waits.awaited(console.show, f"3 runs of {num_steps} steps, their noise and batches"):
        return whole_run.audit(trainer.build(config, dataset))


def _print_row(row: JsonObject) -> None:
    console.say(f"step {row['step']:>6}  test accuracy {row['test_accuracy']:.2%}")
