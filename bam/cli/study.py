"""A study: groups of runs, each set beside a baseline, as one kind of table and of JSON."""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from bam import files, provenance
from bam.cli import console, sweeps, tables
from bam.files import JsonMapping, JsonObject
from bam.privacy import accounting
from bam.privacy.accounting import rounded_up
from bam.sweep import comparison
from bam.sweep.comparison import as_json
from bam.training import devices, rundir, trainer

# What every row has of its first run's summary.
SUMMARY = (
    "epsilon", "delta", "noise_multiplier", "sensitivity", "sampling_prob", "num_steps",
    "expected_batch_size", "num_params", "num_frozen", "dataset",
)  # fmt: skip
# Heading -> what the diagnostics measure; a ‖bias‖ is never shown without what it is made of.
BIAS = {"‖bias‖": "bias_norm", "‖ĝ‖": "gradient_norm", "ratio": "relative_bias", "cosine": "cosine"}
# Keys of a config that say where a machine has its data.
PATHS = ("dataset.path", "dataset.groups", "public_clip.path", "features.cache", "init_from")

Runs = Mapping[str, Mapping[int, sweeps.Run]]  # label -> seed -> run


@dataclasses.dataclass(frozen=True)
class Study:
    """What is trained, and what is set beside what.

    Attributes:
      groups: label -> config, of any seed; `--num_seeds` runs of each are trained.
      baseline: label -> the label whose runs of the same seeds a group is paired with; a group that
        has none, or itself, gains nothing.
      columns: of the table, besides those that every study has.
      facts: `(label, runs) -> {name: value}`, for these columns and the JSON file.
      first_seed: of the runs.
      folder: of the runs in `--workdir`.
    """

    groups: Mapping[str, ConfigDict]
    baseline: Callable[[str], str | None]
    columns: tables.Columns = dataclasses.field(default_factory=dict)
    facts: Callable[[str, Sequence[sweeps.Run]], JsonObject] = lambda label, runs: {}
    first_seed: int = 0
    folder: str = ""

    def configs(self, num_seeds: int = 0) -> dict[str, sweeps.Configs]:
        """Label -> its runs; `num_seeds` other than 0 takes the place of `--num_seeds`."""
        folders = {label: str(Path(self.folder, _as_name(label))) for label in self.groups}
        if len(set(folders.values())) < len(folders):
            raise ValueError(f"two of these groups have one folder: {', '.join(folders)}")
        return {
            label: sweeps.with_seeds(folders[label], config, self.first_seed, num_seeds)
            for label, config in self.groups.items()
        }


def carry_out(study: Study, out: Path) -> tuple[list[JsonObject], Runs]:
    """Trains what is missing, writes `OUT.json` and `OUT.md`, prints the table; its rows and runs.

    Runs are trained seed by seed, go on where they were stopped, and may be shared by processes.
    A study that is not finished is written as far as it is, and ends the command with exit status
    3. Accuracies are in %, gains in points, paired by seed; what the diagnostics measured, which is
    NOT PRIVATE, is the mean over training without the weights before it.
    """
    console.check_writable(f"{out}.json")
    found = sweeps.run_missing(study.configs())
    rows = [row(study, label, found) for label, runs in found.items() if runs]
    made: JsonObject = {"device": devices.name(), "commit": provenance.git_commit()}
    made |= {"versions": provenance.versions(), "rows": rows}
    files.write_json(out.with_name(f"{out.name}.json"), made)
    tables.show(columns(study, rows), rows, keep=out.with_name(f"{out.name}.md"))
    if any(len(runs) < sweeps.NUM_SEEDS.value for runs in found.values()):
        sys.exit(console.STOPPED)
    return rows, found


def columns(study: Study, rows: Sequence[JsonMapping]) -> tables.Columns:
    """The table's columns: gains where something is paired, bias where it was measured."""
    paired = any(row["baseline"] not in (None, row["label"]) for row in rows)
    measured = {heading: x for heading, x in BIAS.items() if any(row[x] for row in rows)}
    return {
        "group": lambda row: row["label"],
        "ε": lambda row: "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".3g"),
        **study.columns,
        "seeds": lambda row: str(len(row["seeds"])),
        "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
        **(tables.gain("gain", lambda row: row["gain"] is None) if paired else {}),
        **{
            heading: lambda row, x=x: tables.number(row[x] and row[x]["mean"], ".3f")  # type: ignore[misc]
            for heading, x in measured.items()
        },
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }


def row(study: Study, label: str, found: Runs) -> JsonObject:
    """What `OUT.json` has of a group."""
    runs, baseline = found[label], study.baseline(label)
    first = next(iter(runs.values()))
    accuracies = percent(runs)
    gain = None
    if baseline not in (None, label):
        gain = comparison.paired_difference(accuracies, percent(found[str(baseline)]))
    config = study.groups[label].copy_and_resolve_references()
    config.update_from_flattened_dict({key: "" for key in PATHS})
    config.seed = None
    return {
        "label": label,
        "method": first.method,
        **{key: first.summary[key] for key in SUMMARY},
        **{
            name: as_json(comparison.estimate(list(measured(runs, name)))) for name in BIAS.values()
        },
        **study.facts(label, list(runs.values())),
        "seeds": list(accuracies),
        "accuracies": list(accuracies.values()),
        "accuracy": as_json(comparison.estimate(list(accuracies.values()))),
        "baseline": baseline,
        "gain": as_json(gain),
        "p": gain and comparison.p_value(gain),
        "minimum_detectable_effect": gain and comparison.minimum_detectable_effect(gain),
        "seconds": statistics.median(run.summary["seconds"] for run in runs.values()),
        "config": rundir.as_json(config),
    }


def percent(runs: Mapping[int, sweeps.Run]) -> dict[int, float]:
    """Seed -> test accuracy in %."""
    return {seed: 100 * run.summary["test_accuracy"] for seed, run in runs.items()}


def measured(runs: Mapping[int, sweeps.Run], quantity: str) -> list[float]:
    """Per run the mean over training of what diagnostics measured and is finite, if anything is."""
    key = f"not_private/{quantity}"
    of_runs = [[r.get(key) for r in run.rows if r["step"]] for run in runs.values()]
    finite = [[value for value in values if value is not None] for values in of_runs]
    return [statistics.fmean(values) for values in finite if values]


def _as_name(label: str) -> str:
    text = label.replace("ε", "epsilon")
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-=") else "_" for c in text)


def with_smaller_batches(config: ConfigDict, factor: int) -> ConfigDict:
    """The config with batches and noise so many times smaller, and its number of steps.

    At one σ/l, C, learning rate and T the noise on a mean is the same, and training looks alike:
    what is the best of cheap runs is likely to be the best of dear ones. Their ε is far larger.

    Source: Sander et al. 2023, "TAN Without a Burn: Scaling Laws of DP-SGD" (arXiv 2210.03403).
    """
    plan = trainer.build(config).plan
    if plan.mechanism_name != "poisson" or not plan.private or plan.expected_batch_size % factor:
        raise ValueError(
            f"--smaller={factor} needs a private run of Poisson batches, whose expected size it "
            f"divides: {plan.expected_batch_size}"
        )
    found = config.copy_and_resolve_references()
    found.expected_batch_size = plan.expected_batch_size // factor
    found.num_steps, found.accountant = plan.training_steps, "rdp"
    found.epsilon = accounting.epsilon(
        noise_multiplier=plan.noise_multiplier / factor,
        sampling_prob=plan.sampling_prob / factor,
        num_steps=plan.num_steps,
        delta=plan.delta - plan.overflow,
        accountant="rdp",
    )
    return found
