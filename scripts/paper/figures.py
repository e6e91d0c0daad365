"""The paper's figures 2 and 4 to 6, each from runs that this command makes or finds in its workdir.

python -m scripts.paper.figures --figure=2 --workdir=runs/figures --out=docs/figures \
  --config=configs/cifar10_small.py --config.dataset.source=parquet --config.dataset.path=FOLDER

Figures 5 and 6 are of the weights before and after that training, "lambda" (bias against λ) of
DP-SGD's. All of them read private data and are NOT PRIVATE. Figure 3 is scripts.benchmarks.depth's.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from bam import files
from bam.cli import console, sweeps, tables
from bam.files import JsonObject
from bam.sweep import plot, runs
from bam.training import diagnostics, loop, registry
from bam.training.feed import Feed
from scripts.paper import effects
from scripts.paper.effects import BIAS

_FIGURE = flags.DEFINE_enum(
    "figure", None, ["2", "4", "5", "6", "lambda"], "the paper's number, or these"
)
_OUT = flags.DEFINE_string("out", "docs/figures", "folder for the pictures and the numbers")
_METHODS = flags.DEFINE_list(
    "methods",
    "dp_sgd,dp_sat:0.086,bam_sam:0.01,bam_sam:0.02,bam_sam:0.05,bam_sam:0.1,bam_exact:0.02",
    "what is trained and shown, METHOD or METHOD:STRENGTH; dp_sgd is needed for lambda",
)
flags.adopt_module_key_flags(sweeps)
console.require("figure", "workdir")

SMALLEST, LARGEST = 64, 4096  # batches of figures 5 and 6, of as many examples as the largest
STAGES = {"start": "before the first step", "end": "after the last step"}
# Positions `[n]` and a value for each seed `[seeds, n]`.
Points = tuple[Sequence[float], np.ndarray]


def main() -> None:
    """Runs what the figure needs, then writes its picture and its numbers."""
    with console.one_line_errors():
        out, figure = Path(_OUT.value), str(_FIGURE.value)
        path = out / (f"figure{figure}" if figure.isdigit() else figure)
        out.mkdir(parents=True, exist_ok=True)
        series = [_series(name) for name in _METHODS.value]
        trained = sweeps.run_missing({s.slug: s.configs for s in series})
        if any(len(trained[s.slug]) < len(s.configs) for s in series):
            return
        FIGURES[figure]([s._replace(rows=_rows(s, trained[s.slug])) for s in series], path)
    print(f"{path}.png and .csv")


class Series(NamedTuple):
    """Runs that differ by their seed alone."""

    slug: str  # the folder of the runs
    method: JsonObject
    configs: runs.Configs  # in the order of the seeds
    trainer: Callable[[], loop.Trainer]  # built when it is first asked for
    rows: Sequence[Sequence[JsonObject]] = ()  # of metrics, one list per seed, once trained

    @property
    def label(self) -> str:
        """What legends and tables call it."""
        return registry.full_label(self.method)

    def state(self, seed: int, folder: Path, stage: str) -> Any:
        """The state of a finished run before its first or after its last step."""
        if stage == "start":
            return self.trainer().init(seed)
        state = runs.last_state(self.trainer(), seed, folder)
        if state is None:
            raise ValueError(f"{folder} has no checkpoint: --config.checkpoint.every must not be 0")
        return state

    def measured(self, name: str, measure: Callable[[Any], JsonObject]) -> list[JsonObject]:
        """Per run: stage -> what `measure(state)` says; kept as JSON in the run's folder."""
        results = []
        for run, config in self.configs.items():
            folder = Path(sweeps.WORKDIR.value) / run
            if not (folder / name).exists():
                states = {stage: self.state(config.seed, folder, stage) for stage in STAGES}
                facts = {stage: measure(state) for stage, state in states.items()}
                files.write_json(folder / name, facts)
            results.append(files.read_json(folder / name))
        return results


def _series(name: str) -> Series:
    """What `--methods` names, METHOD or METHOD:STRENGTH."""
    config = sweeps.method_config(name)
    if not config.diagnostics.every:
        config.diagnostics.every = 10
    slug = name.replace(":", "_")
    trainer = functools.cache(lambda: loop.build(config))
    configs = runs.with_seeds(slug, config, sweeps.NUM_SEEDS.value)
    return Series(slug, config.method.to_dict(), configs, trainer)


def _rows(series: Series, trained: Mapping[int, runs.Run]) -> list[list[JsonObject]]:
    """Metrics rows, one list per seed, with `cosine_others`.

    ĝ contains g_i/n, so that even unrelated gradients of one norm have a mean cosine of 1/√n with
    it. `cosine_others` is mean_i ⟨g_i/‖g_i‖, ĝ − g_i/n⟩/‖ĝ‖, which is 0 for those on average.
    """
    for config in series.configs.values():
        for row in trained[config.seed].rows:
            if row.get("not_private/cosine_examples") is not None:
                n = config.diagnostics.num_examples
                own = row["not_private/plain/mean_norm"] / row["not_private/plain/gradient_norm"]
                row["not_private/cosine_others"] = row["not_private/cosine_examples"] - own / n
    return [trained[config.seed].rows for config in series.configs.values()]


class Picture:
    """Panels, and the numbers of the CSV file beside them."""

    def __init__(self, series: Sequence[Series]) -> None:
        """`series` are all whose lines have a style."""
        self.series = series
        self.styles = plot.styles([s.method for s in series])
        self.panels: list[plot.Panel] = []
        self.rows: list[JsonObject] = []

    def note(self, quantity: str, label: str, x_name: str, points: Points) -> None:
        """Adds rows to the CSV file: one per position, with every seed's value."""
        for at, values in zip(points[0], points[1].T, strict=True):
            row = {"quantity": quantity, "method": label, x_name: at, "mean": values.mean()}
            self.rows.append(row | {f"seed {seed}": value for seed, value in enumerate(values)})

    def panel(self, quantity: str, heading: str, x_name: str, points: Mapping[str, Points]) -> None:
        """Adds a panel of lines by their label, and its numbers."""
        lines = []
        for label, (x, values) in points.items():
            lines.append(plot.mean_line(label, x, values, self.styles[label]))
            self.note(quantity, label, x_name, (x, values))
        self.panels.append(plot.Panel(heading, x_name, lines, log_x=x_name == "batch size"))

    def write(self, path: Path, title: str, num_columns: int, share_y: bool = False) -> None:
        """Writes the picture as PNG, and the numbers as CSV."""
        config = next(iter(self.series[0].configs.values()))
        title = (
            f"{title}\n{config.dataset.name}, {config.model.name} of width {config.model.width}, "
            f"batch {config.expected_batch_size}, ε = {config.epsilon:g}, "
            f"{sweeps.NUM_SEEDS.value} seeds (± SD)"
        )
        plot.panels(self.panels, path.with_suffix(".png"), title, num_columns, share_y)
        tables.write_csv(path.with_suffix(".csv"), self.rows)


def bias_over_training(series: Sequence[Series], path: Path) -> None:
    """Figure 2: bias over training, with what it is made of, and the effects on them."""
    picture, measured = Picture(series), {}
    for quantity, heading in BIAS.items():
        points = {s.label: plot.over_seeds(s.rows, f"not_private/{quantity}") for s in series}
        picture.panel(quantity, heading, "step", points)
    picture.write(path, "Clipping bias over training", num_columns=2)
    for s in series:
        means = {}
        for name in BIAS:  # without the weights before training, which all share
            values = plot.over_seeds(s.rows, f"not_private/{name}")[1][:, 1:]
            geometric = name in effects.RATIOS
            means[name] = np.exp(np.log(values).mean(1)) if geometric else values.mean(1)
        accuracy = plot.over_seeds(s.rows, "test_accuracy")[1]
        measured[s.label] = means | {"test_accuracy": accuracy[:, -1]}
    effects.write(path.with_name(f"{path.name}_effects"), measured)


def ascent_over_training(series: Sequence[Series], path: Path) -> None:
    """Figure 4: cosine of the ascent directions with the batch gradient."""
    picture = Picture(series)
    for quantity, heading, method in (
        ("cosine_previous", "DP-SAT: cos(previous private gradient, ĝ)", "dp_sat"),
        ("cosine_examples", "BAM: mean of cos(g_i, ĝ)", "bam"),
        ("cosine_others", "the same, g_i's own share of ĝ taken out", "bam"),
    ):
        points = {}
        for s in series:
            if s.method["name"].startswith(method):  # before the first step DP-SAT has no direction
                rows = [[r for r in rows if r["step"] or method == "bam"] for rows in s.rows]
                points[s.label] = plot.over_seeds(rows, f"not_private/{quantity}")
        picture.panel(quantity, heading, "step", points)
    picture.write(path, "Ascent direction against the batch gradient", 3, share_y=True)


def bias_by_batch_size(series: Sequence[Series], path: Path, quantities: Sequence[str]) -> None:
    """Figures 5 and 6: quantities at one θ against the batch size."""
    picture, measured = Picture(series), {}
    for s in series:
        measure = functools.partial(_by_batch_size, s.trainer)
        measured[s.label] = s.measured(f"by_batch_size_{LARGEST}.json", measure)
    for stage, when in STAGES.items():
        for quantity in quantities:
            points: dict[str, Points] = {}
            for label, per_seed in measured.items():
                sizes = [int(size) for size in per_seed[0][stage]]
                values = [[run[stage][str(n)][quantity] for n in sizes] for run in per_seed]
                points[label] = sizes, np.array(values)
            heading = f"{BIAS[quantity]}\n{when}"
            picture.panel(f"{quantity} {stage}", heading, "batch size", points)
    what = "Direction kept" if quantities == ["cosine"] else "Clipping bias"
    picture.write(path, f"{what} against the batch size", max(2, len(quantities)))


def _by_batch_size(trainer: Callable[[], loop.Trainer], state: Any) -> JsonObject:
    """Batch size -> mean of each quantity over batches of that size, the same for every run."""
    built = trainer()

    def group_means() -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(built.plan.num_examples)[:LARGEST]
        on_device = built.place(built.dataset.train)
        for group in order[: len(order) // SMALLEST * SMALLEST].reshape(-1, SMALLEST):
            yield built.means(state, on_device, group.astype(np.int32))[0]

    return diagnostics.bias_by_batch_size(group_means(), SMALLEST, LARGEST)


def bias_by_strength(series: Sequence[Series], path: Path) -> None:
    """Every method's bias at DP-SGD's weights, against λ."""
    at = next((s for s in series if s.method["name"] == "dp_sgd"), None)
    if at is None:
        raise ValueError("--methods needs dp_sgd, at whose weights the others are measured")
    measured = {
        s.label: at.measured(f"{s.slug}_here.json", functools.partial(_not_private, s.trainer))
        for s in series
    }
    sam = {s.label: s for s in series if s.method["name"] in ("dp_sgd", "bam_sam")}
    strengths = {s.label: registry.strength(s.method) for s in series}
    style = plot.style_of("bam_sam") | {"marker": "o", "markersize": 4}
    picture = Picture(series)
    for stage, when in STAGES.items():
        for quantity, heading in BIAS.items():
            values = np.array([[run[stage][quantity] for run in measured[x]] for x in sam]).T
            x = [strengths[label] for label in sam]
            line = plot.mean_line("BAM (SAM); DP-SGD at λ = 0", x, values, style)
            picture.panels.append(plot.Panel(f"{heading}\n{when} of DP-SGD", "λ", [line]))
        for quantity in measured[at.label][0][stage]:
            for label, per_seed in measured.items():
                values = np.array([[run[stage][quantity]] for run in per_seed])
                picture.note(f"{quantity} {stage}", label, "strength", ([strengths[label]], values))
    picture.write(path, "BAM's bias at the same weights", 4)
    for stage in STAGES:
        for prefix, kind in (("", ""), ("against_plain/", "_against_plain")):
            at_stage = {
                label: {name: [run[stage][prefix + name] for run in per_seed] for name in BIAS}
                for label, per_seed in measured.items()
            }
            effects.write(path.with_name(f"{path.name}_{stage}{kind}"), at_stage)


def _not_private(trainer: Callable[[], loop.Trainer], state: Any) -> JsonObject:
    built = trainer()
    facts = loop.not_private(built, state, Feed(built))
    return {name.removeprefix("not_private/"): value for name, value in facts.items()}


FIGURES: dict[str, Callable[[Sequence[Series], Path], None]] = {
    "2": bias_over_training,
    "4": ascent_over_training,
    "5": functools.partial(bias_by_batch_size, quantities=list(BIAS)),
    "6": functools.partial(bias_by_batch_size, quantities=["cosine"]),
    "lambda": bias_by_strength,
}

if __name__ == "__main__":
    console.run(main, ["--config=configs/cifar10_small.py"])
