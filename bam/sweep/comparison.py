"""Groups of runs, compared with a baseline seed by seed.

The statistics suit a few seeds: means, 95 % confidence intervals by Student's t, and paired
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
from bam.sweep.runs import Configs, FinishedRun, with_seeds
from bam.text import did_you_mean
from bam.training import devices, keys, loop, parts, rundir
from bam.training.config import add_options

with needs("train"):
    from ml_collections import ConfigDict

# Keys that a row copies from the summary of its first run.
SUMMARY = (
    "epsilon", "delta", "noise_multiplier", "sensitivity", "sampling_prob", "num_steps",
    "expected_batch_size", "num_params", "num_frozen", "dataset",
)  # fmt: skip
# Diagnostics of a row. ‖bias‖ says little without ‖ĝ‖ and the cosine, so the four stay together.
MEASURED = ("bias_norm", "gradient_norm", "relative_bias", "cosine")
PERCENT = ("accuracy", "balanced_accuracy", "recall")
# First seed of the runs that choose settings. Final runs count from 0, so they share no seed with
# these, and luck in a choice does not improve the final numbers.
SEARCHING = 1000

Runs = Mapping[str, Mapping[int, FinishedRun]]  # label -> seed -> run


class Estimate(NamedTuple):
    """A mean over seeds and its uncertainty.

    `sd` is the sample standard deviation. `half_width` is half the width of the mean's 95 %
    confidence interval by Student's t. Both are None for a single value.
    """

    mean: float
    sd: float | None
    half_width: float | None
    num: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Returns mean, spread and confidence interval of independent normal values.

    It returns None for no values.

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
    """An estimate as JSON files hold it."""
    return estimated and estimated._asdict()


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> Estimate | None:
    """Estimates the mean of value − baseline over the seeds that both have.

    It returns None if they share no seed. Runs with the same seed share initial weights, batches
    and noise, so their difference varies less than either value.

    Examples:
      >>> paired_difference({0: 5.0, 1: 7.0, 2: 1.0}, {0: 4.0, 1: 5.0}).mean
      1.5
    """
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def p_value(effect: Estimate) -> float | None:
    """Two-sided p-value of Student's test that the true mean is 0.

    For paired differences this is the paired test. None for a single value and for equal values,
    because the test needs a spread.

    Examples:
      >>> round(p_value(estimate([0.1, 0.5, 0.3, 0.9, -0.2])), 3)
      0.16
    """
    if not effect.sd:
        return None
    t = effect.mean / (effect.sd / math.sqrt(effect.num))
    return float(2 * stats.t.sf(abs(t), effect.num - 1))


def minimum_detectable_effect(effect: Estimate, power: float = 0.8) -> float | None:
    """The smallest true mean that the test at level 5 % detects with this power.

    The differences are assumed to have the effect's SD; the test statistic then follows the
    noncentral t distribution. So a result that is not significant makes a larger true effect
    unlikely. None for a single value and for equal values.

    Examples:
      >>> [round(minimum_detectable_effect(Estimate(0.0, 1.0, None, n)), 2) for n in (5, 10)]
      [1.68, 1.0]
    """
    if not effect.sd:
        return None
    freedom, scale = effect.num - 1, effect.sd / math.sqrt(effect.num)
    limit = stats.t.ppf(0.975, freedom)

    def excess(shift: float) -> float:
        # The upper tail alone: a significant mean with the wrong sign is not a detection.
        return float(stats.nct.sf(limit, freedom, shift)) - power

    return float(optimize.brentq(excess, 0, 10 * limit)) * scale


@dataclasses.dataclass(frozen=True)
class Study:
    """The groups to train, and the baseline of each.

    Attributes:
      groups: label -> config; its seed is replaced.
      baseline: label -> label of the group that it is paired with, seed by seed. A group without a
        baseline, or that is its own, has no gain.
      columns: heading -> cell of a row, for further columns of the table.
      fields: `(label, runs) -> {name: value}`, further fields of a row, for `columns` and the JSON
        file.
      first_seed: seed of a group's first run; the next runs count on.
      folder: folder of the runs, inside the workdir.
      metric: the figure on test data that is compared, see `metric_of`.
    """

    groups: Mapping[str, ConfigDict]
    baseline: Callable[[str], str | None]
    columns: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)
    fields: Callable[[str, Sequence[FinishedRun]], JsonObject] = lambda label, runs: {}
    first_seed: int = 0
    folder: str = ""
    metric: str = "accuracy"

    def configs(self, num_seeds: int) -> dict[str, Configs]:
        """Label -> configs of its runs."""
        folders = {label: str(Path(self.folder, _as_name(label))) for label in self.groups}
        if len(set(folders.values())) < len(folders):
            raise InputError(f"two of these groups have the same folder: {', '.join(folders)}")
        return {
            label: with_seeds(folders[label], config, num_seeds, self.first_seed)
            for label, config in self.groups.items()
        }

    def result(self, runs: Runs) -> JsonObject:
        """A row for each group with runs, and the device, commit and versions: strict JSON.

        Accuracies are in %. Gains are in points, paired by seed, and positive if a group is better
        than its baseline. Diagnostics, which are NOT PRIVATE, are means over training, without the
        initial weights.
        """
        return {
            "device": devices.name(),
            "commit": provenance.git_commit(),
            "versions": provenance.versions(),
            "rows": [summary_row(self, label, runs) for label in runs if runs[label]],
        }


def make_study(
    config_of: Callable[[str, Mapping[str, str]], ConfigDict],
    methods: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    holdout: int = 0,
    smaller: int = 1,
) -> Study:
    """Every method at every combination of settings, compared with the first method at the same.

    Args:
      config_of: `(method, names) -> config`, with the parts that the settings name, SECTION.name
        -> part.
      methods: METHOD or METHOD:STRENGTH, the baseline first.
      settings: key of the config -> values, as texts of a command line.
      holdout: number of training images that are held out to evaluate the runs; 0: the test split
        evaluates them.
      smaller: divisor of batch size and noise, see `with_smaller_batches`.

    Raises:
      InputError: for a key or value that a config cannot have, or two equal groups.
    """
    groups: dict[str, ConfigDict] = {}
    baseline = {}
    for method, values in itertools.product(methods, itertools.product(*settings.values())):
        chosen = dict(zip(settings, values, strict=True))
        # The parts first: the options of a command line are those of the parts that are named.
        config = config_of(method, {k: x for k, x in chosen.items() if k.endswith(".name")})
        add_options(config, chosen)
        for key, value in chosen.items():
            set_key(config, key, value)
        config.dataset.holdout = holdout
        if smaller > 1:
            config = with_smaller_batches(config, smaller)
        if config.clip_norm_from and "clip_norm" in chosen:
            raise InputError(
                "clip_norm is searched, so it cannot come from --config.clip_norm_from: "
                "add --config.clip_norm_from=''"
            )
        at = [f"{key}={value}" for key, value in chosen.items()]
        label = " ".join([method, *at])
        if label in groups or config in groups.values():
            raise InputError(f"{label} repeats another group: leave one of them out")
        groups[label], baseline[label] = config, " ".join([methods[0], *at])
    return Study(groups, baseline.get, first_seed=SEARCHING if holdout else 0)


def settings_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Key -> values, from texts of the form KEY=VALUE,VALUE."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals and all(values.split(","))):
            raise InputError(f"--set={text} is not KEY=VALUE,VALUE, such as --set=clip_norm=0.5,1")
        if key in settings or key in ("seed", "dry_run", "method.name", "dataset.holdout"):
            raise InputError(f"--set={text}: {key} is set twice, or by this command: leave it out")
        settings[key] = values.split(",")
    return settings


def set_key(config: ConfigDict, key: str, text: str) -> None:
    """Sets a key of a config to the value in a command line's text.

    InputError if the config has no such key, or if the key cannot have that value.
    """
    flat = rundir.flat(config.to_dict())
    if key not in flat:
        raise InputError(f"the config has no key {key!r}{did_you_mean(key, flat)}")
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
    """Returns the name of the metric to compare.

    For "" it is the accuracy, or the loss if some loss has no accuracy. Names are those in
    `figures` of `summary.json`, and those there that begin with `test_`, with or without that
    prefix. InputError, with the possible names, if a loss of bam lacks the metric.
    """
    losses = {config.loss.name: parts.make_loss(config.loss) for config in groups.values()}
    if not metric:
        return "accuracy" if all(loss.right for loss in losses.values()) else "loss"
    metric = metric.removeprefix("test_")
    for name, loss in losses.items():
        metrics = ["loss", *NAMES.get(loss.figures, [])]
        if loss.figures in NAMES and metric.partition("/")[0] not in metrics:
            choices = ", ".join(sorted(metrics))
            raise InputError(
                f"the loss {name} has no metric {metric!r}; choose --metric from {choices}"
            )
    return metric


def is_percent(metric: str) -> bool:
    """Whether a metric is reported in %, and its gains in points."""
    return metric.partition("/")[0] in PERCENT


def metric_by_seed(runs: Mapping[int, FinishedRun], metric: str) -> dict[int, float]:
    """Maps each seed to the metric of its run.

    The metric is in % if `is_percent`. Runs that diverged, and so lack it, are left out.
    InputError, with the names in the summary, if a run that did not diverge lacks it.
    """
    values = {}
    for seed, run in runs.items():
        figures = run.summary.get("figures") or {}
        tests = {k[5:]: x for k, x in run.summary.items() if k.startswith("test_")}
        # A figure is a value with its interval.
        metrics = {name: x and x[0] for name, x in figures.items()} | tests
        value = metrics.get(metric)
        if value is not None:
            values[seed] = value * (100 if is_percent(metric) else 1)
        elif not rundir.divergence(run.summary):
            choices = ", ".join(sorted(name for name, x in metrics.items() if x is not None))
            raise InputError(f"a run has no metric {metric!r}; choose --metric from {choices}")
    return values


def keep_best(study: Study, first: Runs, num: int) -> Study:
    """The `num` best groups of each method, each compared with the baseline's best group.

    `first` holds the runs of the first seed, whose metric decides; a run that diverged is worst.
    """
    sign = -1 if study.metric in LOWER_IS_BETTER else 1
    score = {
        label: sign * next(iter(metric_by_seed(runs, study.metric).values()), -sign * math.inf)
        for label, runs in first.items()
    }
    by_method: dict[str, list[str]] = {}
    for label in sorted(score, key=lambda label: -score[label]):  # stable: ties keep order
        by_method.setdefault(study.groups[label].method.name, []).append(label)
    best = {label for labels in by_method.values() for label in labels[:num]}
    groups = {label: config for label, config in study.groups.items() if label in best}
    baseline = by_method[next(iter(study.groups.values())).method.name][0]
    return dataclasses.replace(study, groups=groups, baseline=lambda label: baseline)


def summary_row(study: Study, label: str, runs: Runs) -> JsonObject:
    """The row of a group in `OUT.json`."""
    group, baseline = runs[label], study.baseline(label)
    first = next(iter(group.values()))
    metric, measures = study.metric, metric_by_seed(group, study.metric)
    gain = None
    if baseline not in (None, label):
        pair = measures, metric_by_seed(runs[str(baseline)], metric)
        gain = paired_difference(*(pair[::-1] if metric in LOWER_IS_BETTER else pair))
    config = study.groups[label].copy_and_resolve_references()
    # Tables are published: without paths of this machine.
    config.update_from_flattened_dict({key: "" for key in keys.PATHS})
    config.seed = None
    return {
        "label": label,
        "method": first.method,
        **{key: first.summary[key] for key in SUMMARY},
        **{name: as_json(estimate(mean_diagnostic(group, name))) for name in MEASURED},
        **study.fields(label, list(group.values())),
        "seeds": list(measures),
        "metric": metric,
        "accuracies" if metric == "accuracy" else "values": list(measures.values()),
        metric: as_json(estimate(list(measures.values()))),
        "baseline": baseline,
        "gain": as_json(gain),
        "p": gain and p_value(gain),
        "minimum_detectable_effect": gain and minimum_detectable_effect(gain),
        "seconds": statistics.median(run.summary["seconds"] for run in group.values()),
        "config": rundir.as_json(config),
    }


def mean_diagnostic(runs: Mapping[int, FinishedRun], quantity: str) -> list[float]:
    """A diagnostic's mean over training, for each run with finite values of it."""
    key = f"not_private/{quantity}"
    series = [[r.get(key) for r in run.rows if r["step"]] for run in runs.values()]
    finite = [[value for value in values if value is not None] for values in series]
    return [statistics.fmean(values) for values in finite if values]


def with_smaller_batches(config: ConfigDict, factor: int) -> ConfigDict:
    """The config with batch size and noise divided by `factor`, and as many steps.

    With equal σ/l, C, learning rate and T, the noise on the mean is the same and training behaves
    alike. So the best setting of these cheap runs is likely the best of the full-size runs. The ε
    of the cheap runs is far larger.

    Source: Sander et al. 2023, "TAN Without a Burn: Scaling Laws of DP-SGD" (arXiv 2210.03403).
    """
    plan = loop.build(config).plan
    if plan.mechanism_name != "poisson" or not plan.private or plan.expected_batch_size % factor:
        raise InputError(
            f"--smaller={factor} needs a private run with Poisson batches and an "
            f"--config.expected_batch_size that it divides, not {plan.expected_batch_size}"
        )
    smaller = config.copy_and_resolve_references()
    smaller.expected_batch_size = plan.expected_batch_size // factor
    # The cheap run's plan finds its σ again from this ε, so both use one accountant; RDP is fast.
    smaller.num_steps, smaller.accountant = plan.training_steps, "rdp"
    smaller.noise_multiplier = None
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
