"""Writes the short tables of finished studies, from the numbers that are kept.

python -m scripts.paper.summaries

The tables are docs/results/summaries/NAME.md; `python -m scripts.lib.pages` puts them into pages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bam import files, tables
from bam.cli import command
from bam.sweep import comparison

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDER = DOCS / "results/summaries"
# The benchmark's data sets, and how pages name them.
DATA = {"features": "CIFAR-10 features", "mnist": "MNIST", "pixels": "CIFAR-10 images"}

# The names of the benchmarks' rows, in the order of their tables.
LABELS = {
    "dp_sgd_4": "DP-SGD, batch × 4",
    "dp_sgd_3": "DP-SGD, batch × 3",
    "dp_sgd_2": "DP-SGD, batch × 2",
    "banded": "Banded noise",
    "random_allocation": "Random allocation",
    "views": "4 views",
    "mixself": "4 views, 4 mixtures",
    "bam_sam": "BAM (SAM)",
    "bam_sam_4": "BAM (SAM), batch × 4",
    "bam_views": "BAM (SAM), 4 views",
    "bam_exact": "BAM (exact)",
    "schedule": "BAM, λ falls to 0",
    "dp_sat": "DP-SAT",
    "automatic": "Automatic clipping",
    "psac": "DP-PSAC",
    "slaclip": "SlaClip",
    "adaptive": "Adaptive clipping",
    "adam_bc": "DP-AdamBC",
    "low_pass": "Low-pass filter",
    "scale": "Scale, then privatise",
    "disk": "DiSK",
    "norm_last": "Normalisation last",
}


def gains() -> str:
    """Gains of the benchmark's methods at ε = 2 on all data sets, and times."""
    found: dict[str, dict[str, Any]] = {}
    for row in _read("benchmark/benchmark_rows.json")["rows"]:
        if row["epsilon"] == 2:
            found.setdefault(row["method"], {})[row["data"]] = row
    lines = []
    for method, label in LABELS.items():
        by_data = found.get(method)
        if by_data:
            times = [row["slowdown"] for row in by_data.values()]
            low, high = f"{min(times):.1f}", f"{max(times):.1f}"
            gained = [by_data.get(data, {"gain": None})["gain"] for data in DATA]
            cells = [tables.interval(gain, "+.2f") for gain in gained]
            lines.append([label, low if low == high else f"{low} to {high}", *cells])
    return _markdown(["at ε = 2", "time ×", *DATA.values()], lines)


def bias_methods() -> str:
    """Gain and bias of the methods that claim less bias."""
    lines = []
    for row in _read("bias_benchmark.json")["rows"]:
        gain = row["gain"] and tables.interval(row["gain"], "+.2f")
        share, cosine = (
            f"{row['bias'][f'against_plain/{x}']['mean']:.2f}" for x in ("relative_bias", "cosine")
        )
        label = LABELS.get(row["name"], "DP-SGD")
        lines.append([label, gain or "–", share, cosine])
    return _markdown(["method", "gain, points", "‖bias‖/‖ĝ‖", "cosine"], lines)


def resnet9() -> str:
    """Accuracy of a ResNet-9 of width 16 in 150 steps, beside DP-SGD of the same seeds."""
    rows = {
        label: _by_seed(path, method)
        for label, (path, method) in {
            "DP-SGD, batches of 1024": ("cifar10_medium", "dp_sgd"),
            "BAM, batches of 1024": ("cifar10_medium", "bam_sam"),
            "BAM at DP-SGD's learning rate": ("cifar10_medium/one_rate", "bam_sam"),
            "DP-SGD, batches of 2048": ("cifar10_medium/double", "dp_sgd"),
        }.items()
    }
    [mirrored] = _read("cifar10_medium/mirrored.json")["rows"]
    rows["DP-SGD, kernels tied over mirrorings"] = dict(
        zip(mirrored["seeds"], mirrored["accuracies"], strict=True)
    )
    base = rows["DP-SGD, batches of 1024"]
    lines = []
    for label, values in rows.items():
        accuracy = comparison.as_json(comparison.estimate([*values.values()]))
        gain = comparison.as_json(comparison.paired_difference(values, base))
        gained = "–" if values is base else tables.interval(gain, "+.2f")
        lines.append([label, str(len(values)), tables.interval(accuracy, ".2f"), gained])
    return _markdown(["150 steps at ε = 2", "seeds", "accuracy, %", "gain, points"], lines)


def banded() -> str:
    """DP-SGD's gain of banded noise over independent noise."""
    settings = {
        "digits": "digits, ε = 3, NAdam",
        "digits_sgd": "digits, ε = 8, SGD",
        "mnist": "MNIST features, ε = 3, SGD",
        "cifar10": "CIFAR-10 features, ε = 8, SGD",
    }
    lines = []
    for name, label in settings.items():
        rows = _read(f"correlated/{name}.json")
        for row in (x for x in rows if x["method"] == "dp_sgd" and x["bands"] > 1):
            gained = tables.interval(row["gain"], "+.2f")
            noise = f"{row['noise_in_sums']:.2f}"
            lines.append([label, str(len(row["seeds"])), str(row["bands"]), noise, gained])
    return _markdown(["setting", "seeds", "bands", "noise in sums", "gain"], lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "gains": gains,
    "bias_methods": bias_methods,
    "resnet9": resnet9,
    "banded": banded,
}


def _by_seed(name: str, method: str) -> dict[int, float]:
    """Seed -> accuracy in %, of a method of a table of one data set at one ε."""
    [row] = (x for x in _read(f"{name}/table1.json")["rows"] if x["method"] == method)
    return dict(zip(row["seeds"], row["accuracies"], strict=True))


def _read(name: str) -> Any:
    return json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))


def _markdown(headings: Sequence[str], lines: Sequence[list[str]]) -> str:
    """A table whose negative numbers have a minus sign, as in the text of pages."""
    signed = [["−" + cell[1:] if cell.startswith("-") else cell for cell in row] for row in lines]
    return tables.markdown(tables.text(*headings), signed)


def main() -> None:
    """Writes every table."""
    FOLDER.mkdir(exist_ok=True)
    for name, table in TABLES.items():
        files.write_text(FOLDER / f"{name}.md", table())


if __name__ == "__main__":
    command.run_script(main)
