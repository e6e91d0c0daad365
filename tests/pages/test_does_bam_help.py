"""The numbers of docs/does_bam_help.md follow from the tables that commands wrote."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bam.sweep import comparison

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def by_seed(name: str) -> dict[tuple[float, str], dict[int, float]]:
    """(ε, method) -> seed -> accuracy in %, of a table of one data set."""
    return {
        (row["epsilon"], row["method"]): dict(zip(row["seeds"], row["accuracies"], strict=True))
        for row in read(RESULTS / name / "table1.json")["rows"]
    }


def paired(ours: list[float], baseline: list[float]) -> comparison.Estimate:
    """The gain of accuracies that are of the same seeds, in order."""
    return comparison.estimate([a - b for a, b in zip(ours, baseline, strict=True)])


def gains() -> Iterator[comparison.Estimate]:
    """Every paired difference, in points, that the answer may speak of, from accuracies by seed."""
    for name in ("scattering", "cifar10_medium", "cifar10_medium/one_rate"):
        table = by_seed(name)
        for (epsilon, method), ours in table.items():
            if method != "dp_sgd" and ours:
                yield comparison.paired_difference(ours, table[epsilon, "dp_sgd"])
    medium = by_seed("cifar10_medium")
    for seeds in (range(5, 9), (*range(5), 9)):  # those that were run first, and the others
        some = {seed: medium[2.0, "bam_sam"][seed] for seed in seeds}
        yield comparison.paired_difference(some, medium[2.0, "dp_sgd"])
    double = by_seed("cifar10_medium/double")[2.0, "dp_sgd"]
    for ours in medium.values():
        yield comparison.paired_difference(double, ours)
    [mirrored] = read(RESULTS / "cifar10_medium/mirrored.json")["rows"]
    ours = dict(zip(mirrored["seeds"], mirrored["accuracies"], strict=True))
    for others in (*medium.values(), double):
        yield comparison.paired_difference(ours, others)
    for rows in (
        *map(read, RESULTS.glob("scattering/strengths*.json")),
        read(DOCS / "demo/search.json"),
        read(RESULTS / "bias_benchmark.json")["rows"],
        *(read(path)["rows"] for path in RESULTS.glob("starts/*.json")),
    ):
        baseline, *others = (row["accuracies"] for row in rows)
        for ours in others:
            yield paired(ours, baseline)
    with (DOCS / "figures/scattering/batches.csv").open(encoding="utf-8") as file:
        trained = {
            (row["batch size"], row["method"]): [100 * float(row[f"seed {s}"]) for s in range(3)]
            for row in csv.DictReader(file)
            if row["quantity"] == "test_accuracy"
        }
    for size, method in trained:
        if method == "BAM (SAM)":
            yield paired(trained[size, method], trained[size, "DP-SGD"])
    for row in read(RESULTS / "benchmark/benchmark_rows.json")["rows"]:
        for key in ("gain", "gain_in_time", "gain_of_bam"):
            if row.get(key):
                yield comparison.Estimate(**row[key])


GAIN = r"[+−]?\d+\.\d+ ± \d+\.\d+"


def wrong(page: str, measured: list[comparison.Estimate]) -> list[str]:
    """What a page says and no table has: gains, "±", and what pairs of them can detect."""
    shown: dict[str, list[float]] = {}
    for gain in measured:
        number = f"{gain.mean:+.2f} ± {gain.half_width:.2f}".replace("-", "−")
        for said in (number, number.lstrip("+−")):  # "gains 1.05 ± 0.32"
            shown.setdefault(said, []).append(comparison.minimum_detectable_effect(gain))
    gains_said, mistakes = [], []
    for gain, detectable in re.findall(rf"({GAIN})|\(detectable ([^);]*)", page):
        if gain:
            gains_said.append(gain)
            mistakes += [gain] * (gain not in shown)
            continue
        numbers = re.findall(r"\d+\.\d+", detectable)
        for of, number in zip(gains_said[-len(numbers) :], numbers, strict=False):
            digits = len(number.split(".")[1])
            if number not in {f"{effect:.{digits}f}" for effect in shown.get(of, [])}:
                mistakes.append(f"{of} detectable {number}")
        gains_said = []
    return mistakes


@pytest.fixture(scope="module")
def measured() -> list[comparison.Estimate]:
    return [gain for gain in gains() if gain.half_width]


@pytest.mark.parametrize(
    ("page", "least"), [("does_bam_help", 20), ("benchmark", 20), ("results_resnet", 5)]
)
def test_a_page_says_what_was_measured(measured, page, least):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    # Generated tables are checked by test_performance.py.
    lines = re.sub("<!-- docs.*?<!-- end -->", "", text, flags=re.DOTALL).splitlines()
    has_accuracies = page == "results_resnet"  # in its tables, which are not gains
    text = "\n".join(line for line in lines if not (has_accuracies and line.startswith("|")))
    assert len(re.findall(GAIN, text)) > least
    assert wrong(text, measured) == []


@pytest.mark.parametrize(
    ("number", "other"),
    [
        ("+1.05 ± 0.32", "+1.15 ± 0.32"),
        ("gains 3.40 ± 0.66", "gains 3.40 ± 0.33"),
        ("−0.52 ± 0.07", "+0.52 ± 0.07"),
        ("−1.81 ± 0.13", "−1.81 ± 0.31"),
        ("(detectable 0.44", "(detectable 0.34"),
        ("(detectable 0.10, 0.26", "(detectable 0.10, 0.25"),
    ],
)
def test_another_number_would_be_seen(measured, number, other):
    page = (DOCS / "does_bam_help.md").read_text(encoding="utf-8")
    assert number in page
    assert wrong(page.replace(number, other), measured)
