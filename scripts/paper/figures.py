"""The paper's figures 2 and 4 to 6, each from runs that this command makes or finds in its workdir.

python -m scripts.paper.figures --figure=2 --workdir=runs/figures --out=docs/figures \
  --config=configs/cifar10_small.py --config.dataset.source=parquet --config.dataset.path=FOLDER

Figures 5 and 6 are of the weights before and after that training (scripts.paper.batches trains with
each batch size), "lambda" (bias against λ) of DP-SGD's. All of them read private data and are NOT
PRIVATE. Figure 3 is scripts.benchmarks.depth's; figure 7 was drawn at the tag one-offs.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, sweeps, tables
from bam.sweep import plot
from bam.sweep.runs import Configs, Run, last_state, with_seeds
from bam.training import diagnostics, loop, registry
from bam.training.feed import Feed
from scripts.paper import effects

_FIGURE = flags.DEFINE_enum(
    "figure", None, ["2", "4", "5", "6", "lambda"], "the paper's number, or these"
)
_OUT = flags.DEFINE_string("out", "docs/figures", "folder for the pictures and the numbers")
_METHODS = flags.DEFINE_list(
    "methods",
    "dp_sgd,dp_sat:0.086,bam_sam:0.01,bam_sam:0.02,bam_sam:0.05,bam_sam:0.1,bam_exact:0.02",
    "what is trained and shown, METHOD or METHOD:STRENGTH; dp_sgd is needed for lambda",
)
_EXAMPLES = flags.DEFINE_integer(
    "examples", 4096, "figures 5 and 6: training examples that make the batches", lower_bound=4096
)
flags.adopt_module_key_flags(sweeps)
console.require("figure", "workdir")

SMALLEST, LARGEST = 64, 4096
STAGES = {"start": "before the first step", "end": "after the last step"}
Values = Mapping[str, Any]


class Series(NamedTuple):
    """Runs that differ by their seed alone."""

    slug: str  # the folder of the runs
    method: dict[str, Any]
    configs: Configs  # in the order of the seeds
    rows: list[list[dict[str, Any]]]  # of metrics, one list per seed; none before they are trained

    @property
    def label(self) -> str:
        """What legends and tables call it."""
        return registry.full_label(self.method)

    def measured(self, name: str, measure: Callable[[ConfigDict, Path], Any]) -> list[Any]:
        """What `measure(config, folder)` says of each run, kept as JSON in the run's folder."""
        found = []
        for cell, config in self.configs.items():
            folder = Path(sweeps.WORKDIR.value) / cell
            if not (folder / name).exists():
                files.write_json(folder / name, measure(config, folder))
            found.append(files.read_json(folder / name))
        return found


def main() -> None:
    """Runs what the figure needs, then writes its picture and its numbers."""
    with console.one_line_errors():
        out, figure = Path(_OUT.value), str(_FIGURE.value)
        path = out / (f"figure{figure}" if figure.isdigit() else figure)
        out.mkdir(parents=True, exist_ok=True)
        series = [_series(name) for name in _METHODS.value]
        runs = sweeps.run_missing({s.slug: s.configs for s in series})
        if any(len(runs[s.slug]) < len(s.configs) for s in series):
            return
        DRAW[figure]([s._replace(rows=_rows(s, runs[s.slug])) for s in series], path)
    print(f"{path}.png and .csv")


def _series(name: str) -> Series:
    """What `--methods` names, METHOD or METHOD:STRENGTH."""
    config = sweeps.method_config(name)
    if not config.diagnostics.every:
        config.diagnostics.every = 10
    slug = name.replace(":", "_")
    return Series(
        slug, config.method.to_dict(), with_seeds(slug, config, sweeps.NUM_SEEDS.value), []
    )


def _rows(series: Series, runs: Mapping[int, Run]) -> list[list[dict[str, Any]]]:
    """Metrics rows, one list per seed, with `cosine_others`.

    ĝ contains g_i/n, so that even unrelated gradients of one norm have a mean cosine of 1/√n with
    it. `cosine_others` is mean_i ⟨g_i/‖g_i‖, ĝ − g_i/n⟩/‖ĝ‖, which is 0 for those on average.
    """
    for config in series.configs.values():
        for row in runs[config.seed].rows:
            if row.get("not_private/cosine_examples") is not None:
                n = config.diagnostics.num_examples
                own = row["not_private/plain/mean_norm"] / row["not_private/plain/gradient_norm"]
                row["not_private/cosine_others"] = row["not_private/cosine_examples"] - own / n
    return [runs[config.seed].rows for config in series.configs.values()]


# Figures of training.


def _figure_2(series: list[Series], path: Path) -> None:
    """Bias over training, with what it is made of."""
    panels = {quantity: (heading, series) for quantity, heading in effects.BIAS_PANELS.items()}
    _over_training(panels, series, path, "Clipping bias over training", num_columns=2)
    measured: dict[str, Values] = {}
    for s in series:
        means = {}
        for name in effects.BIAS_PANELS:  # without the weights before training, which all share
            values = plot.over_seeds(s.rows, f"not_private/{name}")[1][:, 1:]
            geometric = name in effects.RATIOS
            means[name] = np.exp(np.log(values).mean(1)) if geometric else values.mean(1)
        accuracy = plot.over_seeds(s.rows, "test_accuracy")[1]
        measured[s.label] = means | {"test_accuracy": accuracy[:, -1]}
    _write_effects(path.with_name(f"{path.name}_effects"), measured)


def _figure_4(series: list[Series], path: Path) -> None:
    """Cosine of the ascent directions with the batch gradient."""
    sat = [s for s in series if s.method["name"] == "dp_sat"]
    own = [s for s in series if s.method["name"].startswith("bam")]
    panels = {
        "cosine_previous": ("DP-SAT: cos(previous private gradient, ĝ)", sat),
        "cosine_examples": ("BAM: mean of cos(g_i, ĝ)", own),
        "cosine_others": ("the same, g_i's own share of ĝ taken out", own),
    }
    title = "Ascent direction against the batch gradient"
    _over_training(panels, series, path, title, share_y=True)


def _over_training(
    panels: dict[str, tuple[str, list[Series]]],
    series: list[Series],
    path: Path,
    title: str,
    num_columns: int = 3,
    share_y: bool = False,
) -> None:
    styles = plot.styles([s.method for s in series])
    charts, table = [], []
    for quantity, (heading, shown) in panels.items():
        lines = []
        for s in shown:
            rows = s.rows
            if quantity == "cosine_previous":  # before the first step there is no direction
                rows = [[row for row in of_seed if row["step"] > 0] for of_seed in rows]
            steps, values = plot.over_seeds(rows, f"not_private/{quantity}")
            lines.append(plot.mean_line(s.label, steps, values, styles[s.label]))
            table += _table(quantity, s.label, "step", steps, values)
        charts.append(plot.Panel(heading, "step", lines))
    _write(path, charts, table, title, series, num_columns, share_y)


# Figures of weights that were trained: batch size and λ at one θ.


def _against_batch_size(quantities: list[str], series: list[Series], path: Path) -> None:
    """Quantities of `effects.BIAS_PANELS` against the batch size."""
    styles = plot.styles([s.method for s in series])
    measured = {s.label: _by_batch_size(s) for s in series}
    charts, table = [], []
    for stage, when in STAGES.items():
        for quantity in quantities:
            lines = []
            for label, seeds in measured.items():
                sizes = [int(size) for size in seeds[0][stage]]
                values = np.array([[run[stage][str(n)][quantity] for n in sizes] for run in seeds])
                lines.append(plot.mean_line(label, sizes, values, styles[label]))
                table += _table(f"{quantity} {stage}", label, "batch size", sizes, values)
            heading = f"{effects.BIAS_PANELS[quantity]}\n{when}"
            charts.append(plot.Panel(heading, "batch size", lines, log_x=True))
    what = "Direction kept" if quantities == ["cosine"] else "Clipping bias"
    columns = max(2, len(quantities))
    _write(path, charts, table, f"{what} against the batch size", series, columns)


def _by_batch_size(series: Series) -> list[dict[str, Any]]:
    """Per seed: stage -> batch size -> mean of each quantity over batches of that size."""
    experiment = _built(series)

    def measure(config: ConfigDict, folder: Path) -> dict[str, Any]:
        states = {stage: _state(experiment(), config.seed, folder, stage) for stage in STAGES}
        return {
            stage: diagnostics.bias_by_batch_size(
                (own for own, _ in _group_means(experiment(), state)), SMALLEST, LARGEST
            )
            for stage, state in states.items()
        }

    return series.measured(f"by_batch_size_{_EXAMPLES.value}.json", measure)


def _group_means(experiment: loop.Trainer, state: Any) -> Iterator[Any]:
    """Means over disjoint random groups of training examples, the same for every run."""
    num_examples = experiment.plan.num_examples
    order = np.random.default_rng(0).permutation(num_examples)[: _EXAMPLES.value]
    on_device = experiment.place(experiment.dataset.train)
    for group in order[: len(order) // SMALLEST * SMALLEST].reshape(-1, SMALLEST):
        yield experiment.means(state, on_device, group.astype(np.int32))


def _lambda(series: list[Series], path: Path) -> None:
    """Every method's bias at DP-SGD's weights, against λ."""
    at = next((s for s in series if s.method["name"] == "dp_sgd"), None)
    if at is None:
        raise ValueError("--methods needs dp_sgd, at whose weights the others are measured")
    measured = {s.label: _at_weights_of(at, s) for s in series}
    sam = [s for s in series if s.method["name"] in ("dp_sgd", "bam_sam")]
    strengths = [registry.strength(s.method) for s in sam]
    style = plot.style_of("bam_sam") | {"marker": "o", "markersize": 4}
    charts, table = [], []
    for stage, when in STAGES.items():
        for quantity, heading in effects.BIAS_PANELS.items():
            values = np.array([[run[stage][quantity] for run in measured[s.label]] for s in sam]).T
            line = plot.mean_line("BAM (SAM); DP-SGD at λ = 0", strengths, values, style)
            charts.append(plot.Panel(f"{heading}\n{when} of DP-SGD", "λ", [line]))
        for quantity in measured[at.label][0][stage]:
            for s in series:
                values = np.array([[run[stage][quantity]] for run in measured[s.label]])
                strength = registry.strength(s.method)
                table += _table(f"{quantity} {stage}", s.label, "strength", [strength], values)
    _write(path, charts, table, "BAM's bias at the same weights", series, 4)
    for stage in STAGES:
        for prefix, kind in (("", ""), ("against_plain/", "_against_plain")):
            of_stage = {
                label: {
                    name: [run[stage][prefix + name] for run in seeds]
                    for name in effects.BIAS_PANELS
                }
                for label, seeds in measured.items()
            }
            _write_effects(path.with_name(f"{path.name}_{stage}{kind}"), of_stage)


def _at_weights_of(at: Series, series: Series) -> list[dict[str, Any]]:
    """Per seed: stage -> what is said of a method at another method's weights."""
    owner, other = _built(at), _built(series)

    def measure(config: ConfigDict, folder: Path) -> dict[str, Any]:
        feed = Feed(other())
        states = {stage: _state(owner(), config.seed, folder, stage) for stage in STAGES}
        return {n: loop.not_private(other(), state, feed) for n, state in states.items()}

    return [
        {
            stage: {name.removeprefix("not_private/"): v for name, v in of_stage.items()}
            for stage, of_stage in run.items()
        }
        for run in at.measured(f"{series.slug}_here.json", measure)
    ]


def _built(series: Series) -> Callable[[], loop.Trainer]:
    """The series' experiment, built when it is first asked for."""
    return functools.cache(lambda: loop.build(next(iter(series.configs.values()))))


def _state(experiment: loop.Trainer, seed: int, folder: Path, stage: str) -> Any:
    """The state of a finished run before its first or after its last step."""
    if stage == "start":
        return experiment.init(seed)
    state = last_state(experiment, seed, folder)
    if state is None:
        raise ValueError(f"{folder} has no checkpoint: train with --config.checkpoint.every > 0")
    return state


# What all figures share.


def _write(
    path: Path,
    charts: list[plot.Panel],
    table: list[dict[str, Any]],
    title: str,
    series: list[Series],
    num_columns: int,
    share_y: bool = False,
) -> None:
    """Writes the picture, and the numbers beside it."""
    config = next(iter(series[0].configs.values()))
    title = (
        f"{title}\n{config.dataset.name}, {config.model.name} of width {config.model.width}, "
        f"batch {config.expected_batch_size}, ε = {config.epsilon:g}, "
        f"{sweeps.NUM_SEEDS.value} seeds (± SD)"
    )
    plot.panels(charts, path.with_suffix(".png"), title, num_columns, share_y)
    tables.write_csv(path.with_suffix(".csv"), table)


def _write_effects(path: Path, measured: Mapping[str, Values]) -> None:
    """Every method against DP-SGD, as CSV and as a table for documents."""
    baseline = registry.label("dp_sgd")
    if baseline in measured:
        found = effects.rows(measured, baseline)
        tables.write_csv(path.with_suffix(".csv"), found)
        files.write_text(path.with_suffix(".md"), effects.markdown(found, baseline))


def _table(
    quantity: str, label: str, x_name: str, x: list[Any], values: np.ndarray
) -> list[dict[str, Any]]:
    """Rows of the CSV file: one per point, with every seed's value."""
    return [
        {"quantity": quantity, "method": label, x_name: at, "mean": of_seeds.mean()}
        | {f"seed {seed}": value for seed, value in enumerate(of_seeds)}
        for at, of_seeds in zip(x, values.T, strict=True)
    ]


# The figures of trained runs.
DRAW: dict[str, Callable[[list[Series], Path], None]] = {
    "2": _figure_2,
    "4": _figure_4,
    "5": functools.partial(_against_batch_size, list(effects.BIAS_PANELS)),
    "6": functools.partial(_against_batch_size, ["cosine"]),
    "lambda": _lambda,
}

if __name__ == "__main__":
    console.run(main, ["--config=configs/cifar10_small.py"])
