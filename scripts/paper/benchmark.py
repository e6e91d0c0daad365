r"""What makes private training accurate, at equal ε and in equal time: every method, searched.

python -m scripts.paper.benchmark --data=mnist --workdir=runs/benchmark \
  --out=docs/results/benchmark/benchmark --config.dataset.path=FOLDER

Each method gets a learning rate and a C of its own, by held-out images and one seed: three of each
and, while the best is at an end, up to three more; with batches and noise four times smaller, where
TAN's rule allows. It is trained with five seeds, paired with DP-SGD's, and with ten if it is within
half a point of the best. Beside it stands DP-SGD with the batch whose step takes nearest to its
time, of steps that --time has timed in turn. Finished runs are in the JSON file, which the same
command goes on from: several processes may share it, each with --data or --epsilons of its own. The
search looks at private images, and no ε here covers that.
"""

import fcntl
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from bam import files, provenance
from bam.cli import console, options, sweeps, tables, timing
from bam.errors import InputError
from bam.files import JsonObject
from bam.sweep import comparison, plot, runs
from bam.sweep.comparison import as_json, with_smaller_batches
from bam.sweep.plot import plt
from bam.training import devices, rundir, trainer
from configs.extensions import EXTENSIONS, extended

_DATA = flags.DEFINE_list("data", "features,mnist", "data sets: features, mnist, pixels, digits")
_EPSILONS = flags.DEFINE_list(
    "epsilons", "2,1,8", "budgets, at δ = 1e-5; other searches begin at what is best at FIRST"
)
_METHODS = flags.DEFINE_list("methods", "", "of METHODS; empty: all that the data can have")
_OUT = flags.DEFINE_string(
    "out", "docs/results/benchmark/benchmark", "files, less .json, .md and _DATA.png"
)
_TIME = flags.DEFINE_bool(
    "time", False, "train nothing: time a step of every method, in turn, with nothing else running"
)
_DRAW = flags.DEFINE_bool("draw", False, "train nothing: write table and figure of what is there")
options.define(flags.FLAGS, options.MANY_RUNS)
console.require("workdir", "out")


class Data(NamedTuple):
    """A data set with its model: a config file, and what of it is another here."""

    config: str
    changes: JsonObject
    holdout: int = 5000  # training images that settings are judged on
    smaller: int = 4  # times that batches and noise of a search are smaller: TAN's rule
    length: float = 1.0  # a public guess of a gradient's length, at which a C that adapts begins


class Method(NamedTuple):
    """What differs from the config of one of the `bam.training.registry.METHODS`."""

    title: str
    base: str = "dp_sgd"
    sections: Mapping[str, Mapping[str, object]] = {}
    batch: int = 1  # times the data set's
    only: Sequence[str] = ()  # data sets
    without: str = ""  # the method that BAM is added to
    second: str = "clip_norm"  # what is searched beside the rate; a C that is forgotten is not


SHORT: JsonObject = {"num_steps": 100, "expected_batch_size": 1024, "eval.every": 0}
SHORT |= {"dataset.source": "parquet", "delta": 1e-5, "microbatch_size": 1}
DATA = {
    # 15,552 standardised features are 125 long, and their first softmax is off by 0.95.
    "features": Data("cifar10_scattering", SHORT | {"microbatch_size": 8}, length=100.0),
    "mnist": Data(
        "mnist",
        SHORT | {"model.name": "convnet", "model.width": 8, "optimizer.learning_rate": 1.6e-2},
    ),
    "pixels": Data(
        "cifar10_medium",
        SHORT | {"expected_batch_size": 512, "num_steps": 50, "optimizer.learning_rate": 1e-2},
    ),
    # To try the command on: in a minute, without files.
    "digits": Data("digits", {"num_steps": 10, "model.name": "linear"}, 200, 1),
}
SEARCHING, SEEDS, MORE_SEEDS, FIRST = 1000, 5, 10, 2.0
ROUNDS = 9  # of timed steps
NEAR_BEST = 0.5  # points below the best, from which on a method gets more seeds
RATE_FACTOR, CLIP_FACTOR, EXTENSIONS_OF_GRID = 2.0, 3.0, 3
LARGER = (2, 3, 4)  # batches that counterparts in the same time have
PLAIN = ("dp_sgd", *(f"dp_sgd_{k}" for k in LARGER))
LOWEST = -4.0  # gain that the figure shows a point for; below it, the number


def _views(**options: object) -> JsonObject:
    return {"augment": {"views": 4, "shift": 2, "flip": "none", "mixtures": 0} | options}


METHODS: dict[str, Method] = {
    "dp_sgd": Method("DP-SGD"),
    **{f"dp_sgd_{k}": Method(f"DP-SGD, batch × {k}", batch=k) for k in LARGER},
    "bam_sam": Method("BAM (SAM)", "bam_sam", without="dp_sgd"),
    "bam_sam_4": Method(
        "BAM (SAM), batch × 4", "bam_sam", batch=4, only=("pixels",), without="dp_sgd_4"
    ),
    "dp_sat": Method("DP-SAT", "dp_sat"),
    "random_allocation": Method(
        "Random allocation", sections={"mechanism": {"name": "random_allocation", "bands": None}}
    ),
    "banded": Method("Banded noise", sections={"mechanism": {"name": "banded", "bands": 4}}),
    **{
        name: Method(title, *EXTENSIONS[name])
        for name, title in (
            ("automatic", "Automatic clipping"), ("psac", "DP-PSAC"), ("slaclip", "SlaClip"),
            ("adam_bc", "DP-AdamBC"), ("low_pass", "Low-pass filter"),
            ("scale", "Scale, then privatise"),
        )
    },
    "adaptive": Method(
        "Adaptive clipping", "dp_sgd",
        {"clip": EXTENSIONS["adaptive"][1]["clip"] | {"quantile": 0.3}}, second="clip.quantile",
    ),
    "disk": Method(
        "DiSK", "dp_sgd",
        EXTENSIONS["disk"][1] | {
            "optimizer": {
                "name": "sgd", "learning_rate": 2.0, "momentum": 0.0, "per_clip_norm": True,
            }
        },
    ),
    "views": Method("4 views", sections=_views(), only=("mnist", "pixels")),
    "bam_views": Method(
        "BAM (SAM), 4 views", "bam_sam", _views(), only=("pixels",), without="views"
    ),
    "norm_last": Method(
        "Normalisation last", only=("pixels",),
        sections={"model": {"name": "resnet9", "width": 16, "norm_last": True}},
    ),
    "mixself": Method("4 views, 4 mixtures", sections=_views(mixtures=4), only=("mnist", "pixels")),
}  # fmt: skip


class Cell(NamedTuple):
    """A method on data at an ε."""

    data: str
    epsilon: float
    method: str

    @property
    def name(self) -> str:
        """Of its folder, and before its runs' names in the JSON file."""
        return f"{self.data}/epsilon={self.epsilon:g}/{self.method}"

    def config(self, chosen: Mapping[str, float] | None = None, holdout: int = 0) -> ConfigDict:
        """Its config, with a learning rate and a C, or those to begin a search with."""
        data, method = DATA[self.data], METHODS[self.method]
        path = f"configs/{data.config}.py"
        config = sweeps.method_config(flags.FLAGS, method.base, {"epsilon", *data.changes}, path)
        config.update_from_flattened_dict(data.changes)
        uses_sgd = config.optimizer.name == "sgd"
        config = extended(config, method.sections)
        if uses_sgd and config.optimizer.name != "sgd":  # a rate of plain steps is none of Adam's
            config.optimizer.learning_rate = 2e-3
            if self.method == "low_pass":
                config.optimizer.update({"name": "examples.low_pass:sgd", "learning_rate": 2.0})
        config.epsilon, config.dataset.holdout = self.epsilon, holdout
        config.expected_batch_size *= method.batch
        if method.second != CLIP:
            config.clip_norm = data.length
        config.update_from_flattened_dict(chosen or {})
        if "learning_rate" in config.method:  # that of the steps themselves
            config.method.learning_rate = config.optimizer.learning_rate / config.clip_norm
        return config


RATE, CLIP = "optimizer.learning_rate", "clip_norm"
LEFT_OUT = ("dataset.path", "features.cache")  # of a record's config


class Results:
    """The finished runs of the JSON file; what is missing is trained and added to it.

    Attributes:
      runs: name -> accuracy in %, seconds, what differs from the base config, and the commit.
    """

    def __init__(self, path: Path, stop: Callable[[], bool]) -> None:
        """`stop` is asked after every step."""
        self.path, self.stop = path, stop
        self.runs: JsonObject = files.read_json(path)["runs"] if path.exists() else {}

    def train(self, wanted: Mapping[str, ConfigDict]) -> None:
        """Trains those of these runs that are not there; SystemExit when time is up."""
        missing = {name: config for name, config in wanted.items() if name not in self.runs}
        if not missing:
            return
        folder = Path(flags.FLAGS.workdir)
        if not self.stop():
            runs.train(missing, folder, self.stop, sweeps.print_event)
        self._add(runs.finished(missing, folder))
        if not missing.keys() <= self.runs.keys():
            raise SystemExit(console.STOPPED)

    def _add(self, finished: Mapping[str, runs.Run]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = files.read_json(self.path) if self.path.exists() else {"runs": {}, "made": {}}
            for name, run in finished.items():
                summary = run.summary
                kept["runs"][name] = {
                    "accuracy": 100 * summary["test_accuracy"],
                    **{key: summary[key] for key in ("seconds", "noise_multiplier", "epsilon")},
                    "config": _differences(name, run.config),
                    "commit": summary["commit"],
                }
                kept["made"][summary["commit"]] = {x: summary[x] for x in ("versions", "device")}
            files.write_json(self.path, kept)
        self.runs = kept["runs"]

    def accuracies(self, cell: Cell) -> dict[int, float]:
        """Seed -> accuracy of the cell's final runs."""
        before = f"{cell.name}/seed"
        return {
            int(name.removeprefix(before)): run["accuracy"]
            for name, run in self.runs.items()
            if name.startswith(before)
        }


def _differences(name: str, config: JsonObject) -> JsonObject:
    """What of a run's config differs from DP-SGD's on that data, at its file's ε."""
    path = f"configs/{DATA[name.split('/')[0]].config}.py"
    base = rundir.flat(sweeps.method_config(flags.FLAGS, "dp_sgd", path=path).to_dict())
    flat = rundir.flat(config)
    return {k: v for k, v in flat.items() if base.get(k) != v and k not in LEFT_OUT}


def search(cell: Cell, results: Results) -> tuple[dict[str, float], list[str]]:
    """The rate and, mostly, C with the best held-out accuracy; which stayed at an end."""
    second = METHODS[cell.method].second
    if cell.epsilon == FIRST:
        first = rundir.flat(cell.config().to_dict())
        chosen = {key: float(first[key]) for key in (RATE, second)}
    else:
        chosen = search(cell._replace(epsilon=FIRST), results)[0]

    def accuracy(key: str, value: float) -> float:
        setting = chosen | {key: value}
        name = f"{cell.name}/search/{setting[RATE]:.3g},{setting[second]:.3g}"
        if name not in results.runs:
            results.train({name: _searched(cell, setting)})
        return float(results.runs[name]["accuracy"])

    def best_of(key: str, grid: Sequence[float]) -> float:
        """Of equals the one at hand: where a method does not depend on C, say."""
        able = [value for value in grid if key != "clip.quantile" or value < 1]
        return max(able, key=lambda value: (accuracy(key, value), value == chosen[key]))

    at_end = []
    for key, factor in ((RATE, RATE_FACTOR), (second, CLIP_FACTOR)):
        grid = [chosen[key] / factor, chosen[key], chosen[key] * factor]
        best = best_of(key, grid)
        for _ in range(EXTENSIONS_OF_GRID):
            if best not in (grid[0], grid[-1]):
                break
            grid = sorted([*grid, best / factor if best == grid[0] else best * factor])
            best = best_of(key, grid)
        if best in (grid[0], grid[-1]):
            at_end.append(key)
        chosen[key] = best
    return chosen, at_end


def _searched(cell: Cell, setting: Mapping[str, float]) -> ConfigDict:
    """The run that judges a setting."""
    data = DATA[cell.data]
    config = cell.config(setting, data.holdout)
    config.seed = SEARCHING
    if data.smaller > 1 and config.mechanism.name == "poisson":
        config = with_smaller_batches(config, data.smaller)
    return config


def train_seeds(cells: Iterable[Cell], results: Results, num: int) -> None:
    """Trains cells at the settings that their searches chose, seed by seed."""
    chosen = {cell: search(cell, results)[0] for cell in cells}
    wanted = {}
    for seed in range(num):
        for cell, setting in chosen.items():
            wanted[f"{cell.name}/seed{seed}"] = config = cell.config(setting)
            config.seed = seed
    results.train(wanted)


def methods_of(data: str) -> list[str]:
    """The methods that a data set can have, but for counterparts, which follow from times."""
    named = [n for n in METHODS if n == "dp_sgd" or n not in PLAIN]
    named = [n for n in named if data in (METHODS[n].only or DATA)]
    return [n for n in named if n in _METHODS.value or not _METHODS.value]


def train(data: str, epsilon: float, results: Results, times: JsonObject) -> list[Cell]:
    """Trains what is missing of a data set at an ε, but for further seeds; returns its cells."""
    cells = [Cell(data, epsilon, method) for method in methods_of(data)]
    train_seeds(cells, results, SEEDS)
    larger = [cell._replace(method=counterpart(cell, times)) for cell in cells]
    for cell in dict.fromkeys(larger):
        if cell not in cells and cell.method != "dp_sgd":
            train_seeds([cell], results, SEEDS)
            cells.append(cell)
    return cells


def train_more(cells: Iterable[Cell], results: Results, times: JsonObject) -> None:
    """Further seeds for cells near the best of their data and ε, and for what they stand beside."""
    means = {cell: _mean(cell, results) for cell in cells}
    for cell, mean in means.items():
        best = max(_mean(cell._replace(method=method), results) for method in METHODS)
        if mean >= best - NEAR_BEST:
            for method in dict.fromkeys([cell.method, "dp_sgd", counterpart(cell, times)]):
                train_seeds([cell._replace(method=method)], results, MORE_SEEDS)


def _mean(cell: Cell, results: Results) -> float:
    estimate = comparison.estimate(list(results.accuracies(cell).values()))
    return estimate.mean if estimate else 0.0


def time_steps(data: str) -> JsonObject:
    """Milliseconds of a step of every method: its median and quartiles."""
    first = trainer.build(Cell(data, FIRST, "dp_sgd").config())
    calls, train = {}, first.place(first.dataset.train)
    for method in dict.fromkeys([*PLAIN, *methods_of(data)]):
        built = trainer.build(Cell(data, FIRST, method).config(), first.dataset)
        calls[method], seconds = timing.step_of(built, built.config.expected_batch_size, train)
        print(f"compiled {data}, {METHODS[method].title}: {seconds:.1f} s", flush=True)
    measured = timing.measure(calls, ROUNDS, 1)
    return {
        method: [1e3 * x for x in timing.summarize(seconds, 0.0)[:3]]
        for method, seconds in measured.items()
    }


def slowdown(cell: Cell, times: JsonObject) -> float | None:
    """The time of its step over DP-SGD's; None if they have not been measured."""
    of = times.get(cell.data, {})
    return of[cell.method][0] / of["dp_sgd"][0] if cell.method in of else None


def counterpart(cell: Cell, times: JsonObject) -> str:
    """DP-SGD with the batch whose step takes nearest to the method's time; its own is it."""
    own = slowdown(cell, times)
    if own is None or cell.method in PLAIN:
        return cell.method
    ratios = {name: slowdown(cell._replace(method=name), times) or math.inf for name in PLAIN}
    return min(PLAIN, key=lambda name: abs(ratios[name] - own))


def row(cell: Cell, results: Results, times: JsonObject) -> JsonObject:
    """What the table says of a cell."""
    chosen, at_end = search(cell, results)
    own, rival = results.accuracies(cell), counterpart(cell, times)
    facts: JsonObject = {**cell._asdict(), **chosen, "at_end": at_end, "seeds": len(own)}
    facts |= {"slowdown": slowdown(cell, times), "counterpart": rival}
    facts["accuracy"] = as_json(comparison.estimate(list(own.values())))
    others = {"gain": "dp_sgd", "gain_in_time": rival}
    if METHODS[cell.method].without:
        others["gain_of_bam"] = METHODS[cell.method].without
    for key, other in others.items():
        theirs = results.accuracies(cell._replace(method=other))
        gain = None if other == cell.method else comparison.paired_difference(own, theirs)
        facts |= {
            key: as_json(gain),
            f"{key}_mde": gain and comparison.minimum_detectable_effect(gain),
        }
    return facts


def _gain(row: JsonObject, key: str, other: str) -> str:
    return "–" if row["method"] == other else str(tables.interval(row[key], "+.2f"))


def _second(row: JsonObject, key: str) -> str:
    """C, or what is searched in its place."""
    name = "" if key == CLIP else f"{key.split('.')[-1]} "
    return f"{name}{row[key]:.3g}{'*' if key in row['at_end'] else ''}"


COLUMNS: tables.Columns = {
    "data": lambda row: row["data"],
    "ε": lambda row: f"{row['epsilon']:g}",
    "method": lambda row: METHODS[row["method"]].title,
    "rate": lambda row: f"{row[RATE]:.3g}{'*' if RATE in row['at_end'] else ''}",
    "C": lambda row: _second(row, METHODS[row["method"]].second),
    "seeds": lambda row: f"{row['seeds']}",
    "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
    "time": lambda row: tables.number(row["slowdown"], ".2f"),
    "gain": lambda row: _gain(row, "gain", "dp_sgd"),
    "detectable": lambda row: tables.number(row.get("gain_mde"), ".2f"),
    "in the same time": lambda row: _gain(row, "gain_in_time", row["counterpart"]),
    "detectable there": lambda row: tables.number(row.get("gain_in_time_mde"), ".2f"),
}
# What BAM adds, where it is used beside something else.
BAM_COLUMNS: tables.Columns = {
    **{key: COLUMNS[key] for key in ("data", "ε")},
    "BAM added to": lambda row: METHODS[METHODS[row["method"]].without].title,
    "pairs": lambda row: f"{row['gain_of_bam']['num']}",
    "gain": lambda row: tables.interval(row["gain_of_bam"], "+.2f"),
    "detectable": lambda row: tables.number(row.get("gain_of_bam_mde"), ".2f"),
}


def report(results: Results, out: Path, times: JsonObject) -> None:
    """Writes the table, the figure and the rows of all cells that have final runs."""
    names = [name.split("/")[:4] for name in results.runs]
    cells = {
        Cell(data, float(epsilon.removeprefix("epsilon=")), method)
        for data, epsilon, method, run in names
        if run.startswith("seed")
    }
    order = list(METHODS)
    in_order = sorted(cells, key=lambda x: (x.data, x.epsilon, order.index(x.method)))
    rows = [row(cell, results, times) for cell in in_order]
    content = {"device": devices.name(), "versions": provenance.versions(), "rows": rows}
    files.write_json(out.with_name(f"{out.name}_rows.json"), content)
    tables.show(COLUMNS, rows, left=("data", "method"), keep=out.with_name(f"{out.name}.md"))
    with_bam = [x for x in rows if x.get("gain_of_bam")]
    tables.show(BAM_COLUMNS, with_bam, left=("data",), keep=out.with_name(f"{out.name}_bam.md"))
    for data in dict.fromkeys(x["data"] for x in rows):
        draw([x for x in rows if x["data"] == data], out.with_name(f"{out.name}_{data}.png"))


def draw(rows: Sequence[JsonObject], path: Path) -> None:
    """Each method's gain over DP-SGD, beside that of the batch that takes as long."""
    epsilons = sorted({x["epsilon"] for x in rows})
    gains = {(x["epsilon"], x["method"]): x["gain"] or {"mean": 0.0} for x in rows}
    by_method: dict[str, list[JsonObject]] = {}
    for x in rows:
        if x["gain"]:
            by_method.setdefault(x["method"], []).append(x)
    # At the top what gains most.
    order = sorted(
        by_method, key=lambda m: statistics.fmean(x["gain"]["mean"] for x in by_method[m])
    )
    figure, axis = plt.subplots(figsize=(5.2, 1.4 + 0.4 * len(order)), layout="constrained")
    handles: JsonObject = {}
    for place, method in enumerate(order):
        for x in by_method[method]:
            which, gain = epsilons.index(x["epsilon"]), x["gain"]
            y, color = place + 0.22 * (len(epsilons) / 2 - which), f"C{which}"
            rival = gains.get((x["epsilon"], x["counterpart"]))
            if rival and x["counterpart"] != method:
                [handles["DP-SGD in the same time"]] = axis.plot(
                    max(LOWEST, rival["mean"]), y, "D", mfc="none", color="#777777", ms=5
                )
            if gain["mean"] < LOWEST:
                where = (0.01 + 0.24 * which, place)
                text, frame = f"← {-gain['mean']:.0f} lower", axis.get_yaxis_transform()
                axis.text(*where, text, transform=frame, color=color, va="center", fontsize=9)
                continue
            handles[f"ε = {x['epsilon']:g}"] = axis.errorbar(
                gain["mean"], y, xerr=gain["half_width"] or 0.0, fmt="o", ms=5, color=color
            )
    titles = [
        f"{METHODS[m].title}  {tables.number(by_method[m][0]['slowdown'], '.1f')} ×" for m in order
    ]
    axis.set_yticks(range(len(order)), titles)
    axis.axvline(0, color="#999999", lw=0.8)
    axis.set_xlabel("points over DP-SGD")
    plot.legend_below(figure, dict(sorted(handles.items())))
    plot.save(figure, path)


def main() -> None:
    """Trains what is missing, then writes table and figure; also when time is up."""
    with console.one_line_errors():
        if unknown := ({*_DATA.value} - {*DATA}) | ({*_METHODS.value} - {*METHODS}):
            raise InputError(f"unknown: {', '.join(sorted(unknown))}")
        out = Path(_OUT.value)
        asked = console.stop_after(flags.FLAGS.max_seconds)
        results = Results(out.with_name(f"{out.name}.json"), lambda: _DRAW.value or asked())
        console.use_compilation_cache()
        path = out.with_name(f"{out.name}_times.json")
        times = files.read_json(path)["milliseconds"] if path.exists() else {}
        if _TIME.value:
            times |= {x: time_steps(x) for x in _DATA.value}  # all in turn, or no ratio is right
            return timing.keep(path, {"rounds": ROUNDS, "milliseconds": times})
        datas = () if _DRAW.value else _DATA.value
        for data in datas:
            if missing := {*PLAIN, *methods_of(data)} - times.get(data, {}).keys():
                raise InputError(f"{data}: no time of {', '.join(sorted(missing))}: --time first")
        try:
            pairs = [(data, float(epsilon)) for data in datas for epsilon in _EPSILONS.value]
            for cells in [train(*pair, results, times) for pair in pairs]:
                train_more(cells, results, times)
        finally:
            report(results, out, times)


if __name__ == "__main__":
    console.run(main, defaults=["--config=bam/training/config.py"])
