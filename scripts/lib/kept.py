"""Reads what the studies left in docs/ and benchmarks/, for the pictures of the site."""

import csv
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bam.sweep import comparison
from bam.training import registry

ROOT = Path(__file__).parents[2]
BENCHMARK = "docs/results/benchmark/benchmark_rows.json"
Interval = tuple[float, float, float]  # middle and ends


def read(name: str) -> Any:
    """A JSON file, or the rows of a CSV file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines())) if name.endswith(".csv") else json.loads(text)


def where(rows: Iterable[Any], **wanted: object) -> list[Any]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def table(name: str, method: str) -> list[Any]:
    """A method's rows that `scripts.paper.reproduce` left, with its runs' times and batch size."""
    kept = read(f"docs/results/{name}/table1.json")
    rows = [row for row in where(kept["rows"], method=method) if row["seeds"]]
    for row in rows:
        key = f"{row['config']}/epsilon{row['epsilon']:g}/{method}"
        row["seconds"] = [kept["runs"][f"{key}/seed{x}"]["seconds"] for x in row["seeds"]]
        row["batch"] = kept.get("configs", {}).get(key, {}).get("expected_batch_size")
    return rows


def gain(values: Iterable[float], base: Iterable[float]) -> Any:
    """The estimate of a paired gain, as JSON files have it; both are in the order of the seeds."""
    return comparison.as_json(
        comparison.estimate([x - y for x, y in zip(values, base, strict=False)])
    )


def interval(estimate: Mapping[str, Any]) -> Interval:
    """The 95 % interval of an estimate; of a single run its ends are its middle."""
    mean, half = estimate["mean"], estimate["half_width"] or 0.0
    return mean, mean - half, mean + half


def effects(folder: str, quantity: str) -> dict[float, Interval]:
    """λ -> what BAM does to a quantity, of the figure on bias in a folder."""
    rows = where(read(f"docs/figures/{folder}figure2_effects.csv"), quantity=quantity)
    return {
        float(x["method"].split(" = ")[1]): (float(x["effect"]), float(x["low"]), float(x["high"]))
        for x in rows
        if x["method"].startswith("BAM (SAM)")
    }


def gain_rows() -> dict[str, Any]:
    """Every paired gain of BAM over DP-SGD, and that of larger batches; None: a heading."""
    [own], [one] = (table(f"cifar10_medium{x}", "bam_sam") for x in ("", "/one_rate"))
    [base], [larger] = (table(f"cifar10_medium{x}", "dp_sgd") for x in ("", "/double"))
    [cnn] = table("cifar10_scattering_cnn", "bam_sam")
    rows = {"ResNet-9 (width 16), ε = 2": None, "own learning rates": own["difference"]}
    rows |= {"one learning rate": one["difference"], "Linear, CIFAR-10 features": None}
    for method, form in (("bam_sam", ""), ("bam_exact", ", exact form")):
        for row in table("scattering", method):
            rows[f"ε = {row['epsilon']:g}{form}"] = row["difference"]
    rows |= {"ε = 3, small CNN": cnn["difference"], "Linear, features, ε = 3": None}
    accuracies = read("docs/figures/scattering/batches.csv")
    pairs = (where(accuracies, quantity="test_accuracy", method=x) for x in ("BAM (SAM)", "DP-SGD"))
    for pair in zip(*pairs, strict=True):
        values = ([100 * float(x[key]) for key in x if "seed" in key] for x in pair)
        rows[f"batch of {int(pair[0]['batch size']):,}"] = gain(*values)
    rows["Benchmark of methods"] = None
    names = {"features": "linear, features", "mnist": "CNN, MNIST", "pixels": "ResNet-9, 50 steps"}
    added = {"bam_sam_4": "batch × 4", "bam_views": "4 views"}
    for row in read(BENCHMARK)["rows"]:
        if "gain_of_bam" in row:
            beside = added.get(row["method"], f"ε = {row['epsilon']:g}")
            rows[f"{names.get(row['data'], row['data'])}, {beside}"] = row["gain_of_bam"]
    rows["DP-SGD, twice the batch"] = None
    return rows | {"ResNet-9, BAM's time": gain(larger["accuracies"], base["accuracies"])}


def timed() -> dict[str, list[tuple[str, float, Any]]]:
    """Panel -> name, time over DP-SGD's, and accuracy of what is compared at ε = 2."""
    points, [base] = [], table("cifar10_medium", "dp_sgd")
    for name, method in (("", "dp_sgd"), ("", "bam_sam"), ("/double", "dp_sgd")):
        [row] = table(f"cifar10_medium{name}", method)
        times = [x / y for x, y in zip(row["seconds"], base["seconds"], strict=False)]
        label = f"{registry.label(method).removesuffix(' (SAM)')}\nbatch {row['batch']:,}"
        points.append((label, statistics.median(times), row["accuracy"]))
    names = {"dp_sgd": "DP-SGD", "bam_sam": "BAM", "bam_sam_4": "BAM\nbatch × 4"}
    names |= {f"dp_sgd_{k}": f"DP-SGD\nbatch × {k}" for k in (2, 3, 4)}
    found = where(read(BENCHMARK)["rows"], data="pixels", epsilon=2.0)
    found = [x for x in found if x["method"] in names]
    pixels = [(names[x["method"]], x["slowdown"], x["accuracy"]) for x in found]
    more = {"The same network, 50 steps": pixels} if len(pixels) > 2 else {}
    return {"ResNet-9 (width 16) on CIFAR-10, ε = 2": points} | more


def strength_lines() -> dict[str, dict[float, Interval]]:
    """Setting -> λ -> what BAM gains over DP-SGD at the same settings, in points."""
    features = where(read("docs/results/scattering/strengths_C50.json"), method="bam_sam")
    digits = read("docs/demo/search.json")
    [base] = where(digits, method="dp_sgd")
    digits = where(digits, method="bam_sam")
    gains = [gain(row["accuracies"], base["accuracies"]) for row in digits]
    small = effects("", "test_accuracy")
    return {
        "Linear, features": {row["strength"]: interval(row["gain"]) for row in features},
        "CNN, digits": {
            row["strength"]: interval(gain) for row, gain in zip(digits, gains, strict=True)
        },
        "ResNet-9 (width 8), CIFAR-10": {
            x: (100 * a, 100 * b, 100 * c) for x, (a, b, c) in small.items()
        },
    }
