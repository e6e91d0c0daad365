"""The paper's figures 2 and 4 to 6. Runs that the workdir lacks are trained first.

python -m scripts.paper.figures --figure=2 --workdir=runs/figures \
  --config=configs/cifar10_small.py --config.dataset.path=FOLDER

Figures 5 and 6 show the weights before and after training. All figures read private data and are
NOT PRIVATE. Figure 3 is drawn by scripts.benchmarks.depth.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from jaxtyping import PyTree

from bam import files, tables, waits
from bam.cli import command, screen
from bam.errors import InputError
from bam.files import JsonObject
from bam.sweep import plot, runs
from bam.training import diagnostics, loop, methods
from scripts.lib import many_runs
from scripts.paper.pictures import ASCENT, BIAS, STAGES

_FIGURE = flags.DEFINE_enum("figure", None, ["2", "4", "5", "6"], "the paper's number")
_OUT = flags.DEFINE_string("out", "", "folder for the pictures and the numbers; '': --workdir")
_METHODS = flags.DEFINE_list(
    "methods",
    "dp_sgd,dp_sat:0.086,bam_sam:0.01,bam_sam:0.02,bam_sam:0.05,bam_sam:0.1,bam_exact:0.02",
    "methods to train and draw, METHOD or METHOD:STRENGTH",
)

SMALLEST, LARGEST = 64, 4096  # batch sizes of figures 5 and 6; all use LARGEST examples
# Positions `[n]` and a value for each seed `[seeds, n]`.
Points = tuple[Sequence[float], np.ndarray]


def main() -> None:
    """Trains the missing runs of a figure, then writes its picture and its numbers."""
    path = Path(_OUT.value or flags.FLAGS.workdir) / f"figure{_FIGURE.value}"
    series = [_series(name) for name in _METHODS.value]
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = many_runs.run_missing({s.slug: s.configs for s in series})
    finished = [s._replace(rows=_rows(s, trained[s.slug])) for s in series]
    FIGURES[str(_FIGURE.value)](finished, path)
    screen.say(f"picture: {path}.png (numbers: {path}.csv)")


class Series(NamedTuple):
    """Runs that differ only in their seed."""

    slug: str  # the folder of the runs
    method: JsonObject
    configs: runs.Configs  # in the order of the seeds
    rows: Sequence[Sequence[JsonObject]] = ()  # of metrics, one list per seed, once trained

    @property
    def label(self) -> str:
        """Its name in legends and tables."""
        return methods.full_label(self.method)


def _series(name: str) -> Series:
    """The series of METHOD or METHOD:STRENGTH, as `--methods` names it."""
    config = many_runs.method_config(name)
    if not config.diagnostics.every:
        config.diagnostics.every = 10
    slug = name.replace(":", "_")
    configs = runs.with_seeds(slug, config, flags.FLAGS.num_seeds)
    return Series(slug, config.method.to_dict(), configs)


def _rows(series: Series, trained: Mapping[int, runs.FinishedRun]) -> list[list[JsonObject]]:
    """Metrics rows, one list per seed, with `cosine_others`.

    ĝ contains g_i/n, so even unrelated gradients of one norm have a mean cosine of 1/√n with it.
    `cosine_others` is mean_i ⟨g_i/‖g_i‖, ĝ − g_i/n⟩/‖ĝ‖, which is 0 on average for unrelated ones.
    """
    for config in series.configs.values():
        for row in trained[config.seed].rows:
            if row.get("not_private/cosine_examples") is not None:
                n = config.diagnostics.num_examples
                share = row["not_private/plain/mean_norm"] / row["not_private/plain/gradient_norm"]
                row["not_private/cosine_others"] = row["not_private/cosine_examples"] - share / n
    return [trained[config.seed].rows for config in series.configs.values()]


class Picture:
    """Panels, and the numbers of the CSV file beside them."""

    def __init__(self, series: Sequence[Series]) -> None:
        """Gives each of `series` a style."""
        self.series = series
        self.styles = plot.styles([s.method for s in series])
        self.panels: list[plot.Panel] = []
        self.rows: list[JsonObject] = []

    def panel(self, quantity: str, heading: str, x_name: str, points: Mapping[str, Points]) -> None:
        """Adds a panel of lines by their label, and its numbers: every seed's at a position."""
        lines = []
        for label, (x, values) in points.items():
            lines.append(plot.mean_line(label, x, values, self.styles[label]))
            for at, each in zip(x, values.T, strict=True):
                row = {"quantity": quantity, "method": label, x_name: at, "mean": each.mean()}
                self.rows.append(row | {f"seed {seed}": value for seed, value in enumerate(each)})
        self.panels.append(plot.Panel(heading, x_name, lines, log_x=x_name == "batch size"))

    def write(self, path: Path, title: str, share_y: bool = False) -> None:
        """Writes the picture as PNG, and the numbers as CSV."""
        config = next(iter(self.series[0].configs.values()))
        title = (
            f"{title}\n{config.dataset.name}, {config.model.name} of width {config.model.width}\n"
            f"batch {config.expected_batch_size}, ε = {config.epsilon:g}, "
            f"{plot.seeds_in_words(flags.FLAGS.num_seeds, ' (± SD)', '')}"
        )
        with waits.awaited(screen.show, "drawing"):
            plot.panels(self.panels, path.with_suffix(".png"), title, share_y=share_y)
        tables.write_csv(path.with_suffix(".csv"), self.rows)


def bias_over_training(series: Sequence[Series], path: Path) -> None:
    """Figure 2: bias over training, with the quantities of `BIAS`."""
    picture = Picture(series)
    for quantity, heading in BIAS.items():
        points = {s.label: plot.over_seeds(s.rows, f"not_private/{quantity}") for s in series}
        picture.panel(quantity, heading, "step", points)
    picture.write(path, "Clipping bias over training")


def ascent_over_training(series: Sequence[Series], path: Path) -> None:
    """Figure 4: cosine of the ascent directions with the batch gradient."""
    picture = Picture(series)
    for quantity, heading in ASCENT.items():
        method = "dp_sat" if quantity == "cosine_previous" else "bam"
        points = {}
        for s in series:
            if s.method["name"].startswith(method):  # before the first step DP-SAT has no direction
                rows = [[r for r in rows if r["step"] or method == "bam"] for rows in s.rows]
                points[s.label] = plot.over_seeds(rows, f"not_private/{quantity}")
        picture.panel(quantity, heading, "step", points)
    picture.write(path, "Ascent direction against the batch gradient", share_y=True)


def bias_by_batch_size(series: Sequence[Series], path: Path, quantities: Sequence[str]) -> None:
    """Figures 5 and 6: quantities at one θ against the batch size."""
    picture, results = Picture(series), {s.label: _by_batch_size(s) for s in series}
    for stage, when in STAGES.items():
        for quantity in quantities:
            points: dict[str, Points] = {}
            for label, per_seed in results.items():
                sizes = [int(size) for size in per_seed[0][stage]]
                values = [[run[stage][str(n)][quantity] for n in sizes] for run in per_seed]
                points[label] = sizes, np.array(values)
            heading = f"{BIAS[quantity]}\n{when}"
            picture.panel(f"{quantity} {stage}", heading, "batch size", points)
    title = "Direction kept" if quantities == ["cosine"] else "Clipping bias"
    picture.write(path, f"{title} against the batch size")


def _by_batch_size(series: Series) -> list[JsonObject]:
    """Returns, for each run, stage -> batch size -> mean of each quantity.

    The means are kept as JSON in the run's folder.
    """
    results, built = [], loop.build(next(iter(series.configs.values())), log=screen.show)
    for run, config in series.configs.items():
        folder = Path(flags.FLAGS.workdir) / run
        file = folder / f"by_batch_size_{LARGEST}.json"
        if not file.exists():
            last = runs.last_state(built, config.seed, folder)
            if last is None:
                raise InputError(
                    f"{folder}: no checkpoint; --config.checkpoint.every must not be 0"
                )
            states = zip(STAGES, (built.init(config.seed), last), strict=True)
            with waits.awaited(screen.show, f"measuring {run}") as wait:
                means = {stage: _at_state(built, state, wait) for stage, state in states}
            files.write_json(file, means)
        results.append(files.read_json(file))
    return results


def _at_state(built: loop.Trainer, state: Any, wait: waits.Wait) -> JsonObject:
    """Batch size -> mean of each quantity over batches of that size, the same for every run."""
    order = np.random.default_rng(0).permutation(built.plan.num_examples)[:LARGEST]
    groups = order[: len(order) // SMALLEST * SMALLEST].reshape(-1, SMALLEST).astype(np.int32)
    before = wait.share or 0.0

    def means() -> Iterator[PyTree]:
        for number, group in enumerate(groups, start=1):
            yield built.mean_gradients(state, built.rows(group))[0]
            wait.share = before + number / len(groups) / len(STAGES)

    return diagnostics.bias_by_batch_size(means(), SMALLEST, LARGEST)


FIGURES: dict[str, Callable[[Sequence[Series], Path], None]] = {
    "2": bias_over_training,
    "4": ascent_over_training,
    "5": functools.partial(bias_by_batch_size, quantities=list(BIAS)),
    "6": functools.partial(bias_by_batch_size, quantities=["cosine"]),
}

if __name__ == "__main__":
    command.run_script(main, ["figure", "workdir"], ["--config=configs/cifar10_small.py"])
