"""Audits the code that trains: lower bounds on ε beside the claimed ε."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues
from ml_collections import ConfigDict

from bam import files, provenance, tables, waits
from bam.audit import canary, checks, one_run, whole_run
from bam.cli import command, jax_setup, options, screen
from bam.cli.run_lines import describe_plan
from bam.errors import InputError
from bam.files import JsonObject
from bam.training import config as base
from bam.training import devices, loop, methods

# (N, l): every example is in every step (q = 1), or in one of four (q = 1/4).
SETTINGS = ((8, 8), (40, 10))
WHOLE_RUN = (80, 20, 120)  # N, l, T of whole runs
# Attributes of a plan that a row of one run records.
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
    "right guesses of all": lambda row: (
        f"{row.get('num_correct_of_all', '–')} of {row['num_canaries']}"
    ),
    "ε at least, entries independent": lambda row: tables.number(
        row.get("empirical_epsilon_lower_independent"), ".2f"
    ),
    "test accuracy": lambda row: f"{row['test_accuracy']:.1%}",
}


def main(argv: Sequence[str]) -> int:
    """Runs `bam audit` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("audit", argv, audit)


def audit(flags: FlagValues) -> int:
    """Runs the audits whose results the file lacks, saves each result at once, prints a table."""
    out = Path(flags.out) if flags.out else None
    rows = _read_rows(out) if out and out.exists() else []
    files.check_writable(flags.out)
    jax_setup.use_compilation_cache()
    if flags.one_run:
        return audit_one_run(flags, rows, out)
    if out:
        audit_methods(flags, rows, out)
    return 0


def _read_rows(path: Path) -> list[JsonObject]:
    """Reads the rows that an earlier command wrote.

    Raises InputError if the file holds anything else.
    """
    try:
        rows: list[JsonObject] = json.loads(files.read_bytes(path))
    except ValueError:
        raise InputError(f"{path} is damaged: not JSON") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise InputError(f"{path} does not hold results of an audit: choose another --out")
    return rows


def audit_methods(flags: FlagValues, rows: list[JsonObject], out: Path) -> None:
    """Audits each method at the `SETTINGS` that `rows` lacks.

    Adds each result to `rows` and to the file `out`.
    """
    for method in flags.methods:
        p_values: dict[str, float] = {}  # whole runs are audited once for all settings
        for num_examples, batch_size in SETTINGS:
            config = config_of(method, batch_size, flags.steps, flags.epsilon)
            setting = {"method": method, "sampling_prob": batch_size / num_examples}
            setting |= {"num_trials": flags.trials, "num_steps": flags.steps}
            setting |= {"target_epsilon": flags.epsilon, "confidence": flags.confidence}
            if not any(setting.items() <= row.items() for row in rows):
                p_values = p_values or whole_run_p_values(method, flags.epsilon)
                rows.append(run(config, num_examples, setting, p_values))
                keep(rows, out)
    screen.table(COLUMNS, many_runs_rows(rows))


def audit_one_run(flags: FlagValues, rows: list[JsonObject], out: Path | None) -> int:
    """Trains once, prints the bound, and saves it in `out` instead of an earlier result.

    An earlier result has the same method, data set and model.
    Returns `options.FAULT` if the bound refutes the claim, otherwise 0.
    """
    config = flags.config
    started = time.perf_counter()
    built = one_run.build(config, flags.canaries)
    plan = built.plan
    real = plan.num_examples - flags.canaries
    screen.say(
        f"{config.method.name} on {built.dataset.name}: {real} examples and "
        f"{flags.canaries} canaries; half of the canaries take part"
    )
    screen.show(describe_plan(built))
    seen = one_run.run(built, flags.canaries, config.seed, on_row=_print_row, log=screen.show)
    with waits.awaited(screen.show, "the least ε that fits the guesses"):
        bounds = one_run.bounds(seen, plan, flags.confidence)
    identity = {
        "kind": "one_run",
        "method": config.method.name,
        "dataset": built.dataset.name,
        "model": config.model.name,
    }
    row = identity | {
        "num_params": built.num_params,
        "num_examples": real,
        "num_canaries": flags.canaries,
        "num_included": int(seen.included.sum()),
        **{key: getattr(plan, key) for key in PLANNED},
        "claimed_epsilon": plan.epsilon,
        "confidence": flags.confidence,
        "num_guesses": bounds.num_guesses,
        "num_correct": bounds.num_correct,
        "num_correct_of_all": bounds.num_correct_of_all,
        "empirical_epsilon_lower": bounds.epsilon_lower,
        "empirical_epsilon_lower_any_mechanism": bounds.epsilon_lower_any,
        "empirical_epsilon_lower_independent": bounds.epsilon_lower_independent,
        "test_accuracy": seen.test_accuracy,
        "seed": config.seed,
        **provenance_row(started),
    }
    lower = bounds.epsilon_lower, bounds.epsilon_lower_any, bounds.epsilon_lower_independent
    wrong = max(lower) > plan.epsilon
    screen.say(
        f"{bounds.num_correct} of {bounds.num_guesses} guesses are right, and "
        f"{bounds.num_correct_of_all} of all {flags.canaries}: ε is at least "
        f"{bounds.epsilon_lower_any:.2f} at {flags.confidence:.0%} confidence, at least "
        f"{bounds.epsilon_lower:.2f} if noise is Gaussian and batches are as planned, and at least "
        f"{bounds.epsilon_lower_independent:.2f} if those of different canaries are independent, "
        f"too; claimed {plan.epsilon:.2f} at δ = {plan.delta:g}"
        f"{'. THE CLAIM IS WRONG' if wrong else ''}"
    )
    if out:
        rows = [other for other in rows if not identity.items() <= other.items()]
        keep([*rows, row], out)
    return options.FAULT if wrong else 0


def provenance_row(started: float) -> JsonObject:
    """Columns of a row about the machine, the versions and the time since `started`."""
    seconds = time.perf_counter() - started
    return {"device": devices.name(), "seconds": seconds, "versions": provenance.versions()}


def keep(rows: list[JsonObject], out: Path) -> None:
    """Writes all rows to `out`, and a table of each kind of row beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(out, rows)
    if many := many_runs_rows(rows):
        files.write_text(out.with_suffix(".md"), tables.markdown(COLUMNS, many))
    if single := [row for row in rows if row.get("kind") == "one_run"]:
        path = out.with_name(f"{out.stem}_one_run.md")
        files.write_text(path, tables.markdown(ONE_RUN_COLUMNS, single))


def many_runs_rows(rows: list[JsonObject]) -> list[JsonObject]:
    """The rows of audits by many runs, which have no `kind`."""
    return [row for row in rows if row.get("kind") != "one_run"]


def config_of(method: str, batch_size: int, num_steps: int, epsilon: float) -> ConfigDict:
    """A linear model on the canary's data, with two views, so that views are audited, too."""
    config = base.get_config(method)
    config.update({"num_steps": num_steps, "epsilon": epsilon, "microbatch_size": 1})
    config.expected_batch_size = batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.learning_rate = 1e-3
    config.augment.views = 2
    return config


def run(
    config: ConfigDict, num_examples: int, setting: JsonObject, p_values: dict[str, float]
) -> JsonObject:
    """Audits one setting by many runs and returns its row.

    The row begins with `setting`.
    """
    started = time.perf_counter()
    plan = loop.build(config, canary.canary_dataset(num_examples)).plan
    present, absent = canary.scores(config, num_examples, setting["num_trials"], log=screen.show)
    with waits.awaited(screen.show, "the least ε that fits their scores"):
        bound = canary.lower_bound(
            present,
            absent,
            sampling_prob=plan.sampling_prob,
            num_steps=plan.num_steps,
            delta=plan.delta,
            confidence=setting["confidence"],
        )
    row = setting | {
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
    screen.say(
        f"{row['method']}, q = {row['sampling_prob']:g}: ε is at least {bound.epsilon_lower:.2f}; "
        f"{passed}"
    )
    return row


def whole_run_p_values(method: str, epsilon: float) -> dict[str, float]:
    """p-values of three whole runs of a method, stopped and resumed: see `bam.audit.whole_run`."""
    num_examples, batch_size, num_steps = WHOLE_RUN
    config = config_of(method, batch_size, num_steps, epsilon)
    dataset = canary.canary_dataset(num_examples, num_classes=10, num_features=36)
    with waits.awaited(screen.show, f"the noise and batches of 3 runs of {num_steps} steps"):
        return whole_run.audit(loop.build(config, dataset))


def _print_row(row: JsonObject) -> None:
    screen.say(f"step {row['step']:>6}  test accuracy {row['test_accuracy']:.2%}")
