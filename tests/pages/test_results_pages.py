"""The numbers of the pages of results follow from the files that commands wrote."""

import csv
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bam.sweep import comparison
from scripts.lib import pages
from scripts.paper import summaries

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


def other_numbers() -> Iterator[comparison.Estimate]:
    """Every other estimate that a page may give: accuracies, and gains over another baseline."""
    for name in ("scattering", "cifar10_medium", "cifar10_scattering_cnn", "mnist_scattering"):
        for row in read(RESULTS / name / "table1.json")["rows"]:
            if row["seeds"]:
                yield comparison.Estimate(**row["accuracy"])
    for name in ("digits_poisson", "digits_fixed_size"):
        for row in read(RESULTS / f"batches/{name}.json")["rows"]:
            yield comparison.Estimate(**row["accuracy"])
    for path in RESULTS.glob("correlated/*.json"):
        for row in read(path):
            yield comparison.Estimate(**row["gain"])
    for row in read(RESULTS / "logistic.json")["rows"]:
        yield comparison.Estimate(**row["accuracy"])
        if row["gain"]:
            yield comparison.Estimate(**row["gain"])
    for name in ("benchmark/benchmark_rows", "prior/five_parts1", "prior/five_parts3", "clip_norm"):
        for row in read(RESULTS / f"{name}.json")["rows"]:
            yield comparison.Estimate(**row["accuracy"])
    for row in read(RESULTS / "finetuning/cifar10.json")["rows"]:
        yield comparison.Estimate(**row["gain"])
    folds = {
        name: [sum(seeds) / len(seeds) for seeds in found["values"]]
        for name, found in read(RESULTS / "prior/protocol.json").items()
    }
    for name, ours in folds.items():  # "prior 1 0": features, ε and the first seed
        _, epsilon, seed = name.split()
        for baseline in (f"prior {epsilon} {seed}", f"prior+net_one_view_sides {epsilon} {seed}"):
            if baseline in folds:
                yield paired(ours, folds[baseline])


def intervals() -> Iterator[str]:
    """Every number with the ends of its interval that a page may give, as pages write it."""
    for path in (DOCS / "figures").rglob("*.csv"):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if "effect" in row:
                    scale = 100 if row["quantity"] == "test_accuracy" else 1
                    number, *ends = (scale * float(row[x]) for x in ("effect", "low", "high"))
                    for form in (".2f", ".3f", "+.2f", "+.3f"):
                        low, high = (format(end, form) for end in ends)
                        yield f"{number:{form}} [{low}, {high}]".replace("-", "−")
    correlations = (DOCS / "figures/bias_accuracy.md").read_text(encoding="utf-8")
    yield from re.findall(INTERVAL, correlations.replace("-", "−"))


GAIN = r"[+−]?\d+\.\d+ ± \d+\.\d+"
INTERVAL = r"[+−]?\d+\.\d+ \[[+−]?\d+\.\d+, [+−]?\d+\.\d+\]"


def wrong(page: str, measured: list[comparison.Estimate]) -> list[str]:
    """What a page says and no table has: gains, "±", and what pairs of them can detect."""
    shown: dict[str, list[comparison.Estimate]] = {}
    for gain in measured:
        number = f"{gain.mean:+.2f} ± {gain.half_width:.2f}".replace("-", "−")
        for said in (number, number.lstrip("+−")):  # "gains 1.05 ± 0.32"
            shown.setdefault(said, []).append(gain)
    gains_said, mistakes = [], []
    for gain, detectable in re.findall(rf"({GAIN})|\(detectable ([^);]*)", page):
        if gain:
            gains_said.append(gain)
            mistakes += [gain] * (gain not in shown)
            continue
        numbers = re.findall(r"\d+\.\d+", detectable)
        for of, number in zip(gains_said[-len(numbers) :], numbers, strict=False):
            digits = len(number.split(".")[1])
            effects = map(comparison.minimum_detectable_effect, shown.get(of, []))
            if number not in {f"{effect:.{digits}f}" for effect in effects}:
                mistakes.append(f"{of} detectable {number}")
        gains_said = []
    return mistakes + sorted(set(re.findall(INTERVAL, page)).difference(intervals()))


@pytest.fixture(scope="module")
def measured() -> list[comparison.Estimate]:
    return [x for x in (*gains(), *other_numbers()) if x.half_width]


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("does_bam_help", 15),
        ("benchmark", 7),
        ("results", 5),
        ("batches", 3),
        ("log", 30),
        ("../README", 1),
    ],
)
def test_a_page_says_what_was_measured(measured, page, least):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    # Generated tables are checked by test_performance.py and below.
    text = re.sub("<!-- (?!end).*?<!-- end -->", "", text, flags=re.DOTALL)
    assert len(re.findall(GAIN, text)) > least
    assert wrong(text, measured) == []


@pytest.mark.parametrize(
    ("page", "number", "other"),
    [
        ("does_bam_help", "+1.05 ± 0.32", "+1.15 ± 0.32"),
        ("does_bam_help", "gains 3.40 ± 0.66", "gains 3.40 ± 0.33"),
        ("does_bam_help", "−0.52 ± 0.07", "+0.52 ± 0.07"),
        ("does_bam_help", "−1.81 ± 0.13", "−1.81 ± 0.31"),
        ("does_bam_help", "(detectable 0.44", "(detectable 0.34"),
        ("does_bam_help", "(detectable 0.10, 0.26", "(detectable 0.10, 0.25"),
        ("does_bam_help", "0.55 [0.51, 0.60]", "0.55 [0.51, 0.61]"),
        ("does_bam_help", "−0.06 [−0.30, +0.18]", "+0.06 [−0.30, +0.18]"),
        ("benchmark", "63.31 ± 0.17", "63.31 ± 0.16"),
        ("results", "(detectable 1.42)", "(detectable 1.41)"),
        ("batches", "88.00 ± 2.41", "88.00 ± 2.40"),
        ("log", "−3.97 ± 0.68", "+3.97 ± 0.68"),
        ("log", "−1.40 ± 0.65", "−1.04 ± 0.65"),
    ],
)
def test_another_number_would_be_seen(measured, page, number, other):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert number in text
    assert wrong(text.replace(number, other), measured) != wrong(text, measured)


def test_the_short_tables_are_those_of_the_files_and_a_page_shows_each():
    shown = [
        name
        for page in DOCS.glob("*.md")
        for name in pages.FILE.findall(page.read_text(encoding="utf-8"))
    ]
    for name, table in summaries.TABLES.items():
        path = summaries.FOLDER / f"{name}.md"
        assert path.read_text(encoding="utf-8") == table(), f"{name}: scripts.paper.summaries"
        assert str(path.relative_to(DOCS.parent)) in shown


def test_a_short_table_has_the_numbers_of_the_table_that_it_shortens():
    """Row by row, with the tables that the studies' own commands wrote."""
    whole = (RESULTS / "benchmark/benchmark.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in whole.splitlines()[2:]]
    at_two = {(row[0], row[2]): row[8] for row in rows if row[1] == "2"}
    short = [line.split("|")[1:-1] for line in summaries.TABLES["gains"]().splitlines()[2:]]
    found = 0
    for method, _, *gained in short:
        for data, gain in zip(summaries.DATA, gained, strict=True):
            expected = at_two.pop((data, method.strip()), "not run")
            assert gain.strip() == expected.replace("-", "−")
            found += expected != "not run"
    assert found > 30
    assert set(at_two.values()) == {"–"}  # DP-SGD itself


def test_the_bias_of_the_smallest_and_the_largest_batches_is_that_of_the_file():
    with (DOCS / "figures/scattering/batches.csv").open(encoding="utf-8") as file:
        found = {
            (row["quantity"], row["batch size"]): statistics.mean(
                float(row[f"seed {seed}"]) for seed in range(3)
            )
            for row in csv.DictReader(file)
            if row["method"] == "DP-SGD"
        }
    (bias, less), (share, more) = (
        (f"{found[quantity, '256']:.2f}", f"{found[quantity, '16384']:.2f}")
        for quantity in ("bias_norm", "relative_bias")
    )
    page, log = ((DOCS / name).read_text(encoding="utf-8") for name in ("benchmark.md", "log.md"))
    said = f"from {bias} in batches of 256 to {less} in batches of 16,384, and its share rises"
    assert f"{said} from {share} to {more}" in " ".join(page.split())
    assert f"grows from {share} to {more}" in log
