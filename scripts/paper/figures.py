"""The paper's figures 2 and 4 to 7, each from runs that this command makes or finds in its workdir.

python -m scripts.paper.figures --figure=2 --workdir=runs/figures --out=docs/figures \
  --config=configs/cifar10_small.py --config.dataset.source=parquet --config.dataset.path=FOLDER

Figures 5 and 6 are of the weights before and after that training, "lambda" (bias against λ) of
DP-SGD's; "method" is of three descents in two dimensions. All of them read private data and are NOT
PRIVATE, but for 7 and method, which have none. Figure 3 is scripts.benchmarks.depth's.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from bam import checkpoint, devices, diagnostics, parts, plotting, report, train
from scripts.lib import cells, cli
from scripts.paper import effects, sketch

_FIGURE = flags.DEFINE_enum(
    "figure",
    None,
    ["2", "4", "5", "6", "7", "lambda", "method"],
    "the paper's number, or these",
)
_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/cifar10_small.py", "configs/NAME.py, without a method"
)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for the runs, which figures share")
_OUT = flags.DEFINE_string("out", "docs/figures", "folder for the pictures and the numbers")
_METHODS = flags.DEFINE_list(
    "methods",
    "dp_sgd,dp_sat:0.086,bam_sam:0.01,bam_sam:0.02,bam_sam:0.05,bam_sam:0.1,bam_exact:0.02",
    "what is trained and shown, METHOD or METHOD:STRENGTH; dp_sgd is needed for lambda",
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds 0, 1, …", lower_bound=1)
_EXAMPLES = flags.DEFINE_integer(
    "examples", 4096, "figures 5 and 6: training examples that make the batches", lower_bound=4096
)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
flags.mark_flags_as_required(["figure"])

SMALLEST, LARGEST = 64, 4096
STAGES = {"start": "before the first step", "end": "after the last step"}
# ‖bias‖ is never shown without the quantities that say what it is made of.
BIAS_PANELS = {
    "bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "gradient_norm": "gradient ‖ĝ‖",
    "relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
    "cosine": "direction kept, cos(ĝ_clip, ĝ)",
}


class Series(NamedTuple):
    """Runs that differ by their seed alone.

    Attributes:
      method: the `method` section of their config.
      configs: cell name -> config, in the order of the seeds.
    """

    method: dict[str, Any]
    configs: dict[str, ConfigDict]

    @property
    def label(self) -> str:
        """What legends and tables call it."""
        return parts.full_label(self.method)

    @property
    def slug(self) -> str:
        """The folder of its runs."""
        return next(iter(self.configs)).split("/")[0]


def main() -> None:
    """Runs what the figure needs, then writes its picture and its numbers."""
    with cli.one_line_errors():
        out, figure = Path(_OUT.value), str(_FIGURE.value)
        name = f"figure{figure}" if figure.isdigit() else figure
        if figure not in ("7", "method") and not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for the runs")
        out.mkdir(parents=True, exist_ok=True)
        if figure == "7":
            write_csv(out / f"{name}.csv", sketch.draw(out / name))
        elif figure == "method":
            write_csv(out / f"{name}.csv", sketch.draw_descent(out / name))
        else:
            workdir, series = Path(_WORKDIR.value), _all_series()
            if num_missing := _train_missing(series, workdir):
                print(f"{num_missing} runs are not finished; the same command goes on from there")
                return
            DRAW[figure](series, workdir, out / name)
    print(f"{out / name}.png, .svg and .csv")


def _train_missing(series: list[Series], workdir: Path) -> int:
    """Trains what is not there, seed by seed; returns how many runs are still not finished."""
    by_seed = zip(*(s.configs.items() for s in series), strict=True)
    all_cells = dict(itertools.chain.from_iterable(by_seed))
    cli.use_compilation_cache()
    cells.run(all_cells, workdir, cli.stop_after(_MAX_SECONDS.value), cells.print_event)
    return len(all_cells.keys() - cells.summaries(all_cells, workdir).keys())


def _all_series() -> list[Series]:
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    fixed = {"seed", "dry_run", "method.radius", "method.penalty"}
    found = []
    for one in _METHODS.value:
        method, _, strength = one.partition(":")
        key = parts.METHODS[method].strength if method in parts.METHODS else ""
        if bool(strength) != bool(key):
            raise ValueError(f"--methods={one}: {method} takes {'a' if key else 'no'} strength")
        configs = {}
        for seed in range(_SEEDS.value):
            config = cells.method_config(path, method, fixed)
            config.seed = seed
            if key:
                config.method[key] = float(strength)
            if not config.diagnostics.every:
                config.diagnostics.every = 10
            configs[f"{one.replace(':', '_')}/seed{seed}"] = config
        found.append(Series(config.method.to_dict(), configs))
    return found


def _rows(series: Series, workdir: Path) -> list[list[dict[str, Any]]]:
    """Metrics rows, one list per seed, with `cosine_others`.

    ĝ contains g_i/n, so that even unrelated gradients of one norm have a mean cosine of 1/√n with
    it. `cosine_others` is mean_i ⟨g_i/‖g_i‖, ĝ − g_i/n⟩/‖ĝ‖, which is 0 for those on average.
    """
    found = []
    for cell, config in series.configs.items():
        lines = (workdir / cell / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([json.loads(line) for line in lines])
        for row in found[-1]:
            if "not_private/cosine_examples" in row:
                n = config.diagnostics.num_examples
                own = row["not_private/plain/mean_norm"] / row["not_private/plain/gradient_norm"]
                row["not_private/cosine_others"] = row["not_private/cosine_examples"] - own / n
    return found


# Figures of training.


def _figure_2(series: list[Series], workdir: Path, path: Path) -> None:
    """Bias over training, with what it is made of."""
    _over_training(
        {quantity: (heading, series) for quantity, heading in BIAS_PANELS.items()},
        series, workdir, path, "Clipping bias over training", num_columns=2,
    )  # fmt: skip
    measured = {}
    for one in series:
        quantities = {
            name: plotting.over_seeds(_rows(one, workdir), f"not_private/{name}")[1]
            for name in BIAS_PANELS
        }
        measured[one.label] = {
            # Geometric means over training, without the weights before it, which all share.
            name: np.exp(np.mean(np.log(values[:, 1:]), axis=1))
            if name in effects.RATIOS
            else values[:, 1:].mean(axis=1)
            for name, values in quantities.items()
        }
        accuracy = plotting.over_seeds(_rows(one, workdir), "test_accuracy")[1]
        measured[one.label]["test_accuracy"] = accuracy[:, -1]
    _write_effects(path.with_name(f"{path.name}_effects"), measured)


def _figure_4(series: list[Series], workdir: Path, path: Path) -> None:
    """Cosine of the ascent directions with the batch gradient."""
    sat = [s for s in series if s.method["name"] == "dp_sat"]
    own = [s for s in series if s.method["name"].startswith("bam")]
    panels = {
        "cosine_previous": ("DP-SAT: cos(previous private gradient, ĝ)", sat),
        "cosine_examples": ("BAM: mean of cos(g_i, ĝ)", own),
        "cosine_others": ("the same, g_i's own share of ĝ taken out", own),
    }
    _over_training(
        panels, series, workdir, path, "Ascent direction against the batch gradient", share_y=True
    )


def _over_training(
    panels: dict[str, tuple[str, list[Series]]],
    series: list[Series],
    workdir: Path,
    path: Path,
    title: str,
    num_columns: int = 3,
    share_y: bool = False,
) -> None:
    styles = plotting.styles([s.method for s in series])
    charts, table = [], []
    for quantity, (heading, shown) in panels.items():
        lines = []
        for one in shown:
            rows = _rows(one, workdir)
            if quantity == "cosine_previous":  # before the first step there is no direction
                rows = [[row for row in of_seed if row["step"] > 0] for of_seed in rows]
            steps, values = plotting.over_seeds(rows, f"not_private/{quantity}")
            lines.append(_line(one.label, steps, values, styles[one.label]))
            table += _table(quantity, one.label, "step", steps, values)
        charts.append(plotting.Panel(heading, "step", lines))
    _write(path, charts, table, f"{title}\n{_subject(series)}", num_columns, share_y)


# Figures of weights that were trained: batch size and λ at one θ.


def _figure_5(series: list[Series], workdir: Path, path: Path) -> None:
    """Bias against the batch size, with what it is made of."""
    title = "Clipping bias against the batch size"
    _against_batch_size(BIAS_PANELS, series, workdir, path, title, num_columns=4)


def _figure_6(series: list[Series], workdir: Path, path: Path) -> None:
    """Direction kept against the batch size."""
    panels = {"cosine": BIAS_PANELS["cosine"]}
    title = "Direction kept against the batch size"
    _against_batch_size(panels, series, workdir, path, title, num_columns=2)


def _against_batch_size(
    panels: dict[str, str],
    series: list[Series],
    workdir: Path,
    path: Path,
    title: str,
    num_columns: int,
) -> None:
    styles = plotting.styles([s.method for s in series])
    measured = {s.label: _by_batch_size(s, workdir) for s in series}
    charts, table = [], []
    for stage, when in STAGES.items():
        for quantity, heading in panels.items():
            lines = []
            for label, seeds in measured.items():
                sizes = [int(size) for size in seeds[0][stage]]
                values = np.array([[one[stage][str(n)][quantity] for n in sizes] for one in seeds])
                lines.append(_line(label, sizes, values, styles[label]))
                table += _table(f"{quantity} {stage}", label, "batch size", sizes, values)
            charts.append(plotting.Panel(f"{heading}\n{when}", "batch size", lines, log_x=True))
    _write(path, charts, table, f"{title}\n{_subject(series)}", num_columns)


def _by_batch_size(series: Series, workdir: Path) -> list[dict[str, Any]]:
    """Per seed: stage -> batch size -> mean of each quantity over batches of that size."""
    found = []
    experiment = None
    for cell, config in series.configs.items():
        kept = workdir / cell / f"by_batch_size_{_EXAMPLES.value}.json"
        if not kept.exists():
            experiment = experiment or train.build(config)
            result = {}
            for stage in STAGES:
                state = _state(experiment, config.seed, workdir / cell, stage)
                groups = (own for own, _ in _group_means(experiment, state))
                result[stage] = diagnostics.bias_by_batch_size(groups, SMALLEST, LARGEST)
            report.write_json(kept, result)
        found.append(json.loads(kept.read_text(encoding="utf-8")))
    return found


def _group_means(experiment: train.Experiment, state: Any) -> Iterator[Any]:
    """Means over disjoint random groups of training examples, the same for every run."""
    num_examples = experiment.plan.num_examples
    order = np.random.default_rng(0).permutation(num_examples)[: _EXAMPLES.value]
    on_device = devices.replicate(experiment.dataset.train, experiment.mesh)
    for group in order[: len(order) // SMALLEST * SMALLEST].reshape(-1, SMALLEST):
        yield experiment.means(state, on_device, group.astype(np.int32))


def _lambda(series: list[Series], workdir: Path, path: Path) -> None:
    """Every method's bias at DP-SGD's weights, against λ."""
    at = next((s for s in series if s.method["name"] == "dp_sgd"), None)
    if at is None:
        raise ValueError("--methods needs dp_sgd, at whose weights the others are measured")
    measured = {s.label: _at_weights_of(at, s, workdir) for s in series}
    sam = [s for s in series if s.method["name"] in ("dp_sgd", "bam_sam")]
    strengths = [parts.strength(s.method) for s in sam]
    style = plotting.style_of("bam_sam") | {"marker": "o", "markersize": 4}
    charts, table = [], []
    for stage, when in STAGES.items():
        for quantity, heading in BIAS_PANELS.items():
            values = np.array([[one[stage][quantity] for one in measured[s.label]] for s in sam]).T
            line = _line("BAM (SAM); DP-SGD at λ = 0", strengths, values, style)
            charts.append(plotting.Panel(f"{heading}\n{when} of DP-SGD", "λ", [line]))
        for quantity in measured[at.label][0][stage]:
            for s in series:
                values = np.array([[one[stage][quantity]] for one in measured[s.label]])
                strength = parts.strength(s.method)
                table += _table(f"{quantity} {stage}", s.label, "strength", [strength], values)
    _write(path, charts, table, f"BAM's bias at the same weights\n{_subject(series)}", 4)
    for stage in STAGES:
        for prefix in ("", "against_plain/"):
            of_stage = {
                label: {name: [one[stage][prefix + name] for one in seeds] for name in BIAS_PANELS}
                for label, seeds in measured.items()
            }
            kind = "_against_plain" if prefix else ""
            _write_effects(path.with_name(f"{path.name}_{stage}{kind}"), of_stage)


def _write_effects(path: Path, measured: dict[str, Any]) -> None:
    """Every method against DP-SGD, as CSV and as a table for documents."""
    baseline = parts.label("dp_sgd")
    if baseline in measured:
        found = effects.rows(measured, baseline)
        write_csv(path.with_suffix(".csv"), found)
        report.write_text(path.with_suffix(".md"), effects.markdown(found, baseline))


def _at_weights_of(at: Series, series: Series, workdir: Path) -> list[dict[str, Any]]:
    """Per seed: stage -> what is said of a method at another method's weights."""
    found = []
    experiments: list[train.Experiment] = []
    for cell, config in at.configs.items():
        kept = workdir / cell / f"{series.slug}_here.json"
        if not kept.exists():
            experiments = experiments or [
                train.build(next(iter(s.configs.values()))) for s in (at, series)
            ]
            owner, other = experiments
            on_device = devices.replicate(other.dataset.train, other.mesh)
            result = {
                stage: train.not_private(
                    other, _state(owner, config.seed, workdir / cell, stage), on_device
                )
                for stage in STAGES
            }
            report.write_json(kept, result)
        measured = json.loads(kept.read_text(encoding="utf-8"))
        found.append(
            {
                stage: {name.removeprefix("not_private/"): v for name, v in of_stage.items()}
                for stage, of_stage in measured.items()
            }
        )
    return found


def _state(experiment: train.Experiment, seed: int, folder: Path, stage: str) -> Any:
    """The state of a finished run before its first or after its last step."""
    state = experiment.init(seed)
    if stage == "start":
        return state
    with checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        restored = checkpoints.restore(state)
    if restored is None:
        raise ValueError(f"{folder} has no checkpoint: train with --config.checkpoint.every > 0")
    return restored[1]


# What all figures share.


def _subject(series: list[Series]) -> str:
    config = next(iter(series[0].configs.values()))
    return (
        f"{config.dataset.name}, {config.model.name} of width {config.model.width}, "
        f"batch {config.expected_batch_size}, ε = {config.epsilon:g}, {_SEEDS.value} seeds (± SD)"
    )


def _line(label: str, x: list[Any], values: np.ndarray, style: dict[str, Any]) -> plotting.Line:
    """Mean ± SD over the seeds, the first axis of `values`."""
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else None
    return plotting.Line(label, x, values.mean(axis=0), spread, style)


def _table(
    quantity: str, label: str, x_name: str, x: list[Any], values: np.ndarray
) -> list[dict[str, Any]]:
    """Rows of the CSV file: one per point, with every seed's value."""
    return [
        {
            "quantity": quantity,
            "method": label,
            x_name: at,
            "mean": of_seeds.mean(),
            **{f"seed {seed}": value for seed, value in enumerate(of_seeds)},
        }
        for at, of_seeds in zip(x, values.T, strict=True)
    ]


def _write(
    path: Path,
    charts: list[plotting.Panel],
    table: list[dict[str, Any]],
    title: str,
    num_columns: int,
    share_y: bool = False,
) -> None:
    for suffix in (".png", ".svg"):
        plotting.panels(charts, path.with_suffix(suffix), title, num_columns, share_y)
    write_csv(path.with_suffix(".csv"), table)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows of one shape as CSV, numbers to six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


# The figures of trained runs.
DRAW: dict[str | None, Callable[[list[Series], Path, Path], None]] = {
    "2": _figure_2,
    "4": _figure_4,
    "5": _figure_5,
    "6": _figure_6,
    "lambda": _lambda,
}

if __name__ == "__main__":
    cli.run(main)
