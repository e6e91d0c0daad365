"""Groups of runs, each set beside a baseline by seed: what is compared, and how sure it is.

The statistics are of a few seeds: means, 95 % confidence intervals by Student's t, and paired
differences.
"""

import ast
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from bam import provenance
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models.figures import LOWER_IS_BETTER, NAMES
from bam.privacy import accounting
from bam.sweep.runs import Configs, Run, with_seeds
from bam.training import devices, keys, parts, rundir, trainer
from bam.training.config import add_options

with needs("train"):
    from ml_collections import ConfigDict

# What every row has of its first run's summary.
SUMMARY = (
    "epsilon", "delta", "noise_multiplier", "sensitivity", "sampling_prob", "num_steps",
    "expected_batch_size", "num_params", "num_frozen", "dataset",
)  # fmt: skip
# What every row has of the diagnostics; a ‖bias‖ is never shown without what it is made of.
MEASURED = ("bias_norm", "gradient_norm", "relative_bias", "cosine")
PERCENT = ("accuracy", "balanced_accuracy", "recall")
SEARCHING = 1000  # the first seed of runs that settings are chosen by: no final run has it

Runs = Mapping[str, Mapping[int, Run]]  # label -> seed -> run


class Estimate(NamedTuple):
    """A mean over seeds and how well it is known.

    `sd` is the sample standard deviation, `half_width` half of the 95 % confidence interval of the
    mean by Student's t; both are None for a single value.
    """

    mean: float
    sd: float | None
    half_width: float | None
    num: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, spread and confidence of values that are taken as independent and normal, if any.

    Examples:
      >>> estimate([1.0, 2.0, 3.0])  # doctest: +ELLIPSIS
      Estimate(mean=2.0, sd=1.0, half_width=2.484..., num=3)
    """
    num = len(values)
    if num == 0:
        return None
    mean = float(np.mean(values))
    if num == 1:
        return Estimate(mean, None, None, 1)
    sd = float(np.std(values, ddof=1))
    half_width = float(stats.t.ppf(0.975, num - 1)) * sd / math.sqrt(num)
    return Estimate(mean, sd, half_width, num)


def as_json(estimated: Estimate | None) -> JsonObject | None:
    """An estimate as JSON files have it."""
    return estimated and estimated._asdict()


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> Estimate | None:
    """The mean of value − baseline over the seeds both have, if any.

    Runs with one seed share weights, batches and noise, so their difference has less spread than
    either.

    Examples:
      >>> paired_difference({0: 5.0, 1: 7.0, 2: 1.0}, {0: 4.0, 1: 5.0}).mean
      1.5
    """
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def p_value(effect: Estimate) -> float | None:
    """Two-sided p of Student's test that the true mean is 0; of paired differences, paired.

    None for a single value, and for equal ones: of a spread that was not seen no test can tell.

    Examples:
      >>> round(p_value(estimate([0.1, 0.5, 0.3, 0.9, -0.2])), 3)
      0.16
    """
    if not effect.sd:
        return None
    t = effect.mean / (effect.sd / math.sqrt(effect.num))
    return float(2 * stats.t.sf(abs(t), effect.num - 1))


def minimum_detectable_effect(effect: Estimate, power: float = 0.8) -> float | None:
    """The smallest true mean that this test, at 5 %, detects with this power, at the effect's SD.

    It says what a study of so many seeds can be expected to detect, and so how much a result that
    is not significant excludes: by the noncentral t distribution. None for a single value, and for
    equal ones.

    Examples:
      >>> [round(minimum_detectable_effect(Estimate(0.0, 1.0, None, n)), 2) for n in (5, 10)]
      [1.68, 1.0]
    """
    if not effect.sd:
        return None
    freedom, scale = effect.num - 1, effect.sd / math.sqrt(effect.num)
    limit = stats.t.ppf(0.975, freedom)

    def excess(shift: float) -> float:
        # A significant mean of the wrong sign is no detection; it would be one in 40 at most.
        return float(stats.nct.sf(limit, freedom, shift)) - power

    return float(optimize.brentq(excess, 0, 10 * limit)) * scale


@dataclasses.dataclass(frozen=True)
class Study:
    """What is trained, and what is set beside what.

    Attributes:
      groups: label -> config, of any seed.
      baseline: label -> the label whose runs of the same seeds a group is paired with; a group that
        has none, or itself, gains nothing.
      columns: of the table, besides those that every study has: heading -> cell of a row.
      facts: `(label, runs) -> {name: value}`, for these columns and the JSON file.
      first_seed: of the runs.
      folder: of the runs in the workdir.
      metric: what of the test data is compared, see `metric_of`.
    """

    groups: Mapping[str, ConfigDict]
    baseline: Callable[[str], str | None]
    columns: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)
    facts: Callable[[str, Sequence[Run]], JsonObject] = lambda label, runs: {}
    first_seed: int = 0
    folder: str = ""
    metric: str = "accuracy"

    def configs(self, num_seeds: int) -> dict[str, Configs]:
        """Label -> its runs."""
        folders = {label: str(Path(self.folder, _as_name(label))) for label in self.groups}
        if len(set(folders.values())) < len(folders):
            raise InputError(f"two of these groups have one folder: {', '.join(folders)}")
        return {
            label: with_seeds(folders[label], config, num_seeds, self.first_seed)
            for label, config in self.groups.items()
        }

    def result(self, runs: Runs) -> JsonObject:
        """The rows of all groups that have runs, and what they were made with: strict JSON.

        Accuracies are in %, gains in points, paired by seed, and above 0 where a run is better;
        what the diagnostics measured, which is NOT PRIVATE, is the mean over training without the
        weights before it.
        """
        return {
            "device": devices.name(),
            "commit": provenance.git_commit(),
            "versions": provenance.versions(),
            "rows": [row(self, label, runs) for label in runs if runs[label]],
        }


def grid(
    config_of: Callable[[str], ConfigDict],
    methods: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    holdout: int = 0,
    smaller: int = 1,
) -> Study:
    """Every method at every combination of settings, beside the first method at the same.

    Args:
      config_of: makes the config of one of the methods.
      methods: METHOD or METHOD:STRENGTH, the baseline first.
      settings: key of the config -> values, as a command line has them.
      holdout: training images that the runs are judged on; 0: the test split.
      smaller: how many times smaller batches and noise are, see `with_smaller_batches`.
    """
    groups: dict[str, ConfigDict] = {}
    baseline = {}
    for method, values in itertools.product(methods, itertools.product(*settings.values())):
        chosen = dict(zip(settings, values, strict=True))
        config = config_of(method)
        add_options(config, chosen)
        for key, value in chosen.items():
            set_key(config, key, value)
        config.dataset.holdout = holdout
        if smaller > 1:
            config = with_smaller_batches(config, smaller)
        if config.clip_norm_from and "clip_norm" in chosen:
            raise InputError("clip_norm: C is searched here; set --config.clip_norm_from=''")
        at = [f"{key}={value}" for key, value in chosen.items()]
        label = " ".join([method, *at])
        if label in groups or config in groups.values():
            raise InputError(f"{label} is there twice")
        groups[label], baseline[label] = config, " ".join([methods[0], *at])
    return Study(groups, baseline.get, first_seed=SEARCHING if holdout else 0)


def settings_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Key -> values, from texts KEY=VALUE,VALUE."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals and all(values.split(","))):
            raise InputError(f"{text}: KEY=VALUE,VALUE is needed")
        if key in settings or key in ("seed", "dry_run", "method.name", "dataset.holdout"):
            raise InputError(f"{text}: {key} is set twice, or by this command itself")
        settings[key] = values.split(",")
    return settings


def set_key(config: ConfigDict, key: str, text: str) -> None:
    """Sets a key to a value from a command line; InputError for one that the key cannot have."""
    flat = rundir.flat(config.to_dict())
    if key not in flat:
        raise InputError(f"the config has no key {key!r}")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    if isinstance(flat[key], float) and type(value) is int:
        value = float(value)
    try:
        config.update_from_flattened_dict({key: value})
    except TypeError as error:
        raise InputError(f"{key}={text}: {error}") from None


def metric_of(groups: Mapping[str, ConfigDict], metric: str) -> str:
    """The metric to compare; of no name the accuracy, or the loss where a loss has no accuracy.

    Names are those of `summary.json`: of `figures`, and what begins with `test_` there. InputError,
    with the names that there are, for one that a loss of bam does not have.
    """
    losses = {config.loss.name: parts.make_loss(config.loss) for config in groups.values()}
    if not metric:
        return "accuracy" if all(loss.right for loss in losses.values()) else "loss"
    metric = metric.removeprefix("test_")
    for name, loss in losses.items():
        known = ["loss", *NAMES.get(loss.figures, [])]
        if loss.figures in NAMES and metric.partition("/")[0] not in known:
            there = ", ".join(sorted(known))
            raise InputError(f"no metric {metric!r} of the loss {name}; there are {there}")
    return metric


def is_percent(metric: str) -> bool:
    """Whether a metric is given in %, and gains in points."""
    return metric.partition("/")[0] in PERCENT


def values(runs: Mapping[int, Run], metric: str) -> dict[int, float]:
    """Seed -> metric, in % if `is_percent`; not of runs that diverged and so have none.

    InputError, with the names that there are, if a summary does not have it.
    """
    measured = {}
    for seed, run in runs.items():
        figures = run.summary.get("figures") or {}
        tests = {k[5:]: x for k, x in run.summary.items() if k.startswith("test_")}
        named = {name: x and x[0] for name, x in figures.items()} | tests
        value = named.get(metric)
        if value is not None:
            measured[seed] = value * (100 if is_percent(metric) else 1)
        elif not rundir.divergence(run.summary):
            there = ", ".join(sorted(name for name, x in named.items() if x is not None))
            raise InputError(f"no metric {metric!r} in the summary of a run; there are {there}")
    return measured


def best(study: Study, first: Runs, num: int) -> Study:
    """The best groups of each method by the runs of the first seed, beside the baseline's best."""
    sign = -1 if study.metric in LOWER_IS_BETTER else 1
    score = {
        label: sign * next(iter(values(runs, study.metric).values()), -sign * math.inf)
        for label, runs in first.items()
    }
    by_method: dict[str, list[str]] = {}
    for label in sorted(score, key=lambda label: -score[label]):  # of equals the first
        by_method.setdefault(study.groups[label].method.name, []).append(label)
    kept = {label for labels in by_method.values() for label in labels[:num]}
    groups = {label: config for label, config in study.groups.items() if label in kept}
    baseline = by_method[next(iter(study.groups.values())).method.name][0]
    return dataclasses.replace(study, groups=groups, baseline=lambda label: baseline)


def row(study: Study, label: str, runs: Runs) -> JsonObject:
    """What `OUT.json` has of a group."""
    own, baseline = runs[label], study.baseline(label)
    first = next(iter(own.values()))
    metric, measures = study.metric, values(own, study.metric)
    gain = None
    if baseline not in (None, label):
        pair = measures, values(runs[str(baseline)], metric)
        gain = paired_difference(*(pair[::-1] if metric in LOWER_IS_BETTER else pair))
    config = study.groups[label].copy_and_resolve_references()
    config.update_from_flattened_dict({key: "" for key in keys.PATHS})
    config.seed = None
    return {
        "label": label,
        "method": first.method,
        **{key: first.summary[key] for key in SUMMARY},
        **{name: as_json(estimate(measured(own, name))) for name in MEASURED},
        **study.facts(label, list(own.values())),
        "seeds": list(measures),
        "metric": metric,
        "accuracies" if metric == "accuracy" else "values": list(measures.values()),
        metric: as_json(estimate(list(measures.values()))),
        "baseline": baseline,
        "gain": as_json(gain),
        "p": gain and p_value(gain),
        "minimum_detectable_effect": gain and minimum_detectable_effect(gain),
        "seconds": statistics.median(run.summary["seconds"] for run in own.values()),
        "config": rundir.as_json(config),
    }


def measured(runs: Mapping[int, Run], quantity: str) -> list[float]:
    """Per run the mean over training of what diagnostics measured and is finite, if anything is."""
    key = f"not_private/{quantity}"
    series = [[r.get(key) for r in run.rows if r["step"]] for run in runs.values()]
    finite = [[value for value in values if value is not None] for values in series]
    return [statistics.fmean(values) for values in finite if values]


def with_smaller_batches(config: ConfigDict, factor: int) -> ConfigDict:
    """The config with batches and noise so many times smaller, and its number of steps.

    At one σ/l, C, learning rate and T the noise on a mean is the same, and training looks alike:
    what is the best of cheap runs is likely to be the best of dear ones. Their ε is far larger.

    Source: Sander et al. 2023, "TAN Without a Burn: Scaling Laws of DP-SGD" (arXiv 2210.03403).
    """
    plan = trainer.build(config).plan
    if plan.mechanism_name != "poisson" or not plan.private or plan.expected_batch_size % factor:
        raise InputError(
            f"--smaller={factor} needs a private run of Poisson batches, whose expected size it "
            f"divides: {plan.expected_batch_size}"
        )
    smaller = config.copy_and_resolve_references()
    smaller.expected_batch_size = plan.expected_batch_size // factor
    smaller.num_steps, smaller.accountant = plan.training_steps, "rdp"
    smaller.epsilon = accounting.epsilon(
        noise_multiplier=plan.noise_multiplier / factor,
        sampling_prob=plan.sampling_prob / factor,
        num_steps=plan.num_steps,
        delta=plan.delta - plan.overflow,
        accountant="rdp",
    )
    return smaller


def _as_name(label: str) -> str:
    text = label.replace("ε", "epsilon")
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-=") else "_" for c in text)
