"""The paper's numbers, and the tables of README.md and docs/paper.md with ours beside them.

python -m scripts.paper.numbers

The command fills the tables again from the files of results. Each cell without a run says so.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bam import files, tables
from bam.cli import command
from bam.files import JsonMapping
from bam.sweep import comparison
from scripts.lib import pages

ROOT = Path(__file__).parents[2]

# data -> ε -> method -> test accuracy in %: mean and SD of 3 seeds (ImageNet32: one run).
# The paper has one column for BAM; its runs use the SAM approximation.
TABLE_1: dict[str, dict[float, dict[str, tuple[float, float | None]]]] = {
    "cifar10": {
        1.0: {"dp_sgd": (60.9, 0.49), "dp_sat": (60.9, 0.62), "bam_sam": (61.4, 0.48)},
        2.0: {"dp_sgd": (67.1, 0.10), "dp_sat": (67.2, 0.30), "bam_sam": (68.2, 0.27)},
        10.0: {"dp_sgd": (78.6, 0.08), "dp_sat": (78.1, 0.69), "bam_sam": (79.7, 0.13)},
    },
    "cifar100": {
        1.0: {"dp_sgd": (18.1, 0.10), "dp_sat": (18.2, 0.13), "bam_sam": (18.5, 0.04)},
        2.0: {"dp_sgd": (24.9, 0.46), "dp_sat": (24.9, 0.35), "bam_sam": (25.4, 0.40)},
        10.0: {"dp_sgd": (40.3, 0.21), "dp_sat": (40.1, 0.19), "bam_sam": (40.8, 0.06)},
    },
    "imagenet32": {
        10.0: {"dp_sgd": (14.97, None), "dp_sat": (14.70, None), "bam_sam": (20.67, None)}
    },
}


class Settings(NamedTuple):
    """A row of the paper's Table 2, without the 75 epochs, NAdam and C = 1 that all rows share."""

    network: str
    accumulation: int  # steps of `physical` examples each are one batch
    physical: int
    rate: float
    views: int
    dp_sat: float  # λ
    bam: float  # λ


TABLE_2 = {
    "cifar10": Settings("ResNet-9", 32, 128, 2e-3, 16, 0.086, 0.02),
    "cifar100": Settings("ResNet-9", 32, 128, 2e-3, 16, 0.086, 0.01),
    "imagenet32": Settings("WRN-16-4", 8, 512, 1e-3, 4, 0.07, 0.005),
}

NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet32": "ImageNet32"}
METHODS = {"dp_sgd": "DP-SGD", "dp_sat": "DP-SAT", "bam_sam": "BAM"}
EPSILONS = (1.0, 2.0, 3.0, 8.0)  # of the README's table


def main() -> None:
    """Fills the tables of both pages."""
    for page, its_tables in page_tables().items():
        text = (ROOT / page).read_text(encoding="utf-8")
        files.write_text(ROOT / page, pages.fill(text, its_tables))


def page_tables() -> dict[str, dict[str, str]]:
    """Page -> name of a place -> its table."""
    return {
        "README.md": {"accuracy": accuracy()},
        "docs/paper.md": {"table 1": table_1(), "table 2": table_2(), "figures": figures()},
    }


class Result(NamedTuple):
    """Accuracies in % of the seeds of one setting, and where they come from."""

    accuracies: Sequence[float]
    seconds: Sequence[float]
    commits: Sequence[str]
    device: str

    @property
    def cell(self) -> str:
        """The mean, with its 95 % interval if there are seeds enough for one."""
        return tables.interval(comparison.as_json(comparison.estimate(self.accuracies)), ".2f")


def paper_runs() -> dict[tuple[str, float, str], Result]:
    """(data, ε, method) -> our runs with the paper's configs, which `make accelerator` makes."""
    found = defaultdict(list)
    for path in sorted((ROOT / "benchmarks").glob("*_summary.json")):
        run = files.read_json(path)
        found[run["dataset"], round(run["epsilon"], 3), run["method"]].append(run)
    return {
        key: Result(
            [100 * run["test_accuracy"] for run in runs],
            [run["seconds"] for run in runs],
            [process["commit"] for run in runs for process in run["processes"]],
            runs[0]["processes"][0]["device"].removeprefix("NVIDIA ").split()[0],
        )
        for key, runs in found.items()
    }


def accuracy() -> str:
    """The README's table: accuracy on CIFAR-10 at four ε, with time, device and commit."""
    rows = [
        _row("DP-SGD, linear model on [drawn features](docs/results_prior.md)", _prior()),
        *(
            _row(f"{METHODS[method]}, the paper's ResNet-9", _at_paper_scale(method), method)
            for method in ("dp_sgd", "bam_sam")
        ),
        _row(
            "DP-SGD, [ResNet-9 of width 16](docs/results.md#resnet-9-on-cifar-10)",
            _medium("dp_sgd"),
        ),
        _row("BAM, ResNet-9 of width 16", _medium("bam_sam")),
    ]
    heads = [f"ε = {epsilon:g}" for epsilon in EPSILONS]
    columns = tables.text("test accuracy, %", *heads, "seeds", "a run", "device", "commit")
    return tables.markdown(columns, rows, left=["device", "commit"])


def _prior() -> dict[float, Result]:
    found = {}
    for epsilon in (1.0, 3.0, 8.0):
        table = files.read_json(ROOT / f"docs/results/prior/epsilon{epsilon:g}.json")
        [row] = table["rows"]
        found[epsilon] = Result(
            row["accuracies"], [row["seconds"]], [table["commit"]], "2 CPU cores"
        )
    return found


def _at_paper_scale(method: str) -> dict[float, Result]:
    runs = paper_runs()
    return {e: runs["cifar10", e, method] for e in EPSILONS if ("cifar10", e, method) in runs}


def _medium(method: str) -> dict[float, Result]:
    table = files.read_json(ROOT / "docs/results/cifar10_medium/table1.json")
    found = {}
    for row in table["rows"]:
        if row["method"] == method:
            name = f"cifar10_medium/epsilon{row['epsilon']:g}/{method}/seed"
            runs = [run for key, run in table["runs"].items() if key.startswith(name)]
            found[row["epsilon"]] = Result(
                row["accuracies"],
                [statistics.median(run["seconds"] for run in runs)],
                [run["commit"] for run in runs],
                "1 CPU core",
            )
    return found


def _row(name: str, results: dict[float, Result], published: str = "") -> list[str]:
    """Returns a row of results by ε.

    `published` names the method whose accuracy in the paper is added.
    """
    cells = [results[e].cell if e in results else "not run" for e in EPSILONS]
    for place, epsilon in enumerate(EPSILONS):
        if published and epsilon in TABLE_1["cifar10"]:
            cells[place] += f"; paper {paper_cell(*TABLE_1['cifar10'][epsilon][published])}"
    if not results:
        return [name, *cells, *"––––"]
    kept = list(results.values())
    [seeds] = {len(result.accuracies) for result in kept}
    seconds = [time for result in kept for time in result.seconds]
    commits = [commit for result in kept for commit in result.commits]
    [device] = {result.device for result in kept}
    return [name, *cells, str(seeds), _time(seconds), device, _commits(commits)]


def paper_cell(mean: float, sd: float | None) -> str:
    """A cell of Table 1, with the digits that the paper has."""
    return f"{mean:.2f}" if sd is None else f"{mean:.1f} ± {sd:.2f}"


def _time(seconds: Sequence[float]) -> str:
    """The range of some times, in seconds or, from two minutes on, in minutes."""
    unit, name = (60, "min") if min(seconds) >= 120 else (1, "s")
    ends = dict.fromkeys(f"{end(seconds) / unit:.0f}" for end in (min, max))
    return f"{' to '.join(ends)} {name}"


def _commits(commits: Sequence[str]) -> str:
    """Returns short hashes of commits.

    One with changes that were not committed ends with "+".
    """
    short = {x[:7] + "+" * x.endswith("(modified)") for x in commits}
    return ", ".join(x for x in sorted(short) if f"{x}+" not in short)


def table_1() -> str:
    """The paper's Table 1 with our accuracies."""
    ours = paper_runs()
    rows = []
    for data, by_epsilon in TABLE_1.items():
        for epsilon, by_method in by_epsilon.items():
            cells = []
            for method, published in by_method.items():
                cells += [paper_cell(*published), _ours(ours.get((data, epsilon, method)))]
            rows.append([NAMES[data], f"{epsilon:g}", *cells])
    heads = [f"{name}, {whose}" for name in METHODS.values() for whose in ("paper", "ours")]
    return tables.markdown(tables.text("data", "ε", *heads), rows)


def _ours(result: Result | None) -> str:
    if result is None:
        return "not run"
    seeds = len(result.accuracies)
    return f"{result.cell}, {'one seed' if seeds == 1 else f'{seeds} seeds'}, {result.device}"


def table_2() -> str:
    """The paper's Table 2."""
    rows = [
        [
            NAMES[data], row.network, f"{row.accumulation} × {row.physical}", f"{row.rate:g}",
            f"{row.views}", f"{row.dp_sat:g}", f"{row.bam:g}", f"`configs/{data}.py`",
        ]
        for data, row in TABLE_2.items()
    ]  # fmt: skip
    heads = ("data", "network", "batch", "rate", "views K", "λ DP-SAT", "λ BAM", "config")
    return tables.markdown(tables.text(*heads), rows, left=["network", "config"])


def figures() -> str:
    """What the paper says of each figure, and what we measured."""
    rows = [
        ["2", "‖bias‖ over training: BAM's is clearly lower, DP-SAT's is DP-SGD's", _bias()],
        ["3", "time of a step against depth: manageable below 200 layers", _depth()],
        ["4", "cosine of ascent and gradient: BAM's is positive, DP-SAT's is not", _ascent()],
        ["5", "larger batches lower ‖bias‖", _batches()],
        ["6", "larger batches raise cos(ĝ_clip, ĝ)", _cosines()],
        ["7", "a sketch of ĝ_clip = a·ĝ + c", _sketch()],
    ]  # fmt: skip
    heads = ("figure", "the paper", "ours")
    return tables.markdown(tables.text(*heads), rows, left=heads)


def _bias() -> str:
    effects = {
        row["method"]: row
        for row in _csv("figure2_effects")
        if row["quantity"] == "bias_norm" and row["seeds"] == "3"
    }
    said = []
    for method in ("BAM (SAM), λ = 0.02", "DP-SAT, ρ = 0.086"):
        ratio, low, high = (float(effects[method][x]) for x in ("effect", "low", "high"))
        said.append(f"{method}: {ratio:.2f} [{low:.2f}, {high:.2f}]")
    return f"‖bias‖ over DP-SGD's. {'; '.join(said)}"


def _depth() -> str:
    said = []
    for device, name in (("cpu", "CPU"), ("h100", "H100")):
        table = files.read_json(ROOT / f"benchmarks/depth_{device}.json")
        times = {row["method"]: row["median"] for row in table["rows"] if row["depth"] == 200}
        sam, exact = (times[x] / times["dp_sgd"] for x in ("bam_sam", "bam_exact"))
        said.append(f"{sam:.2f} and {exact:.2f} on {'an' if name == 'H100' else 'a'} {name}")
    return f"200 layers, BAM (SAM) and (exact) over DP-SGD: {'; '.join(said)}"


def _ascent() -> str:
    said = []
    for quantity, method in (
        ("cosine_previous", "DP-SAT, ρ = 0.086"),
        ("cosine_examples", "BAM (SAM), λ = 0.02"),
        ("cosine_others", "BAM (SAM), λ = 0.02"),
    ):
        rows = [
            row
            for row in _csv("figure4")
            if (row["quantity"], row["method"]) == (quantity, method) and row["step"] != "0"
        ]
        seeds = [name for name in rows[0] if name.startswith("seed ")]
        means = [statistics.fmean(float(row[seed]) for row in rows) for seed in seeds]
        without = ", without an example's own share" * (quantity == "cosine_others")
        cosine = tables.interval(comparison.as_json(comparison.estimate(means)), ".3f")
        said.append(f"{method}{without}: {cosine}")
    return "; ".join(said)


def _batches() -> str:
    sizes = _by_size("figure5", "bias_norm end"), _by_size("figure5", "relative_bias end")
    (small, large), (share, larger_share) = sizes
    return (
        f"DP-SGD after training, batches of 64 and 4096: {small:.2f} and {large:.2f}; "
        f"over ‖ĝ‖ {share:.3f} and {larger_share:.3f}"
    )


def _cosines() -> str:
    before, after = (_by_size("figure6", f"cosine {stage}") for stage in ("start", "end"))
    return (
        f"DP-SGD, batches of 64 and 4096: {before[0]:.3f} and {before[1]:.3f} before training, "
        f"{after[0]:.2f} and {after[1]:.2f} after it"
    )


def _by_size(figure: str, quantity: str) -> tuple[float, float]:
    """DP-SGD's mean with the smallest and with the largest batches."""
    means = {
        int(row["batch size"]): float(row["mean"])
        for row in _csv(figure)
        if (row["quantity"], row["method"]) == (quantity, "DP-SGD")
    }
    return means[64], means[4096]


def _sketch() -> str:
    arrows = {row["arrow"]: float(row["first"]) for row in _csv("figure7")}
    return f"24 examples of breast-cancer data: a = {arrows['a·ĝ'] / arrows['ĝ']:.2f}"


def _csv(name: str) -> Iterator[JsonMapping]:
    with (ROOT / f"docs/figures/{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


if __name__ == "__main__":
    command.run_script(main)
