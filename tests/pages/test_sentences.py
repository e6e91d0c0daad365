"""Sentences of the pages on choices, speed, devices and data say what the files say."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest

from bam.sweep import comparison

ROOT = Path(__file__).parents[2]
RESULTS = "docs/results"
INTERVAL = re.compile(r"[+−]?\d+\.\d+ ± \d+\.\d+")
OTHERS = {"67.1 ± 0.10"}  # of the paper


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def estimate(found: Any) -> str:
    number, half_width = (
        (found.mean, found.half_width)
        if isinstance(found, comparison.Estimate)
        else (found["mean"], found["half_width"])
    )
    return f"{number:.2f} ± {half_width:.2f}".replace("-", "−")


def dp_sgd(name: str, epsilon: float) -> Any:
    """The row of DP-SGD in a table of one data set."""
    rows = read(f"{RESULTS}/{name}.json")["rows"]
    [row] = [x for x in rows if (x["epsilon"], x["method"]) == (epsilon, "dp_sgd")]
    return row


def gain(ours: Any, baseline: Any) -> str:
    """The paired gain of one row over another."""
    pairs = (dict(zip(x["seeds"], x["accuracies"], strict=True)) for x in (ours, baseline))
    return estimate(comparison.paired_difference(*pairs))


def choices() -> Iterator[str]:
    """Accuracies and gains on the page that says how to choose."""
    digits = dp_sgd("batches/digits_poisson", 3.0)
    row = "| digits, small CNN | 3 | 256 | 100 | NAdam, 0.01 | 1 |"
    yield f"{row} [{estimate(digits['accuracy'])}]("
    [mnist] = [
        x
        for x in read(f"{RESULTS}/benchmark/benchmark_rows.json")["rows"]
        if (x["data"], x["epsilon"], x["method"]) == ("mnist", 2.0, "dp_sgd")
    ]
    rate = mnist["optimizer.learning_rate"]
    yield f"NAdam, {rate:g} | 1 | [{estimate(mnist['accuracy'])}]("
    medium, double = (dp_sgd(f"cifar10_medium/{x}", 2.0) for x in ("table1", "double/table1"))
    [mirrored] = read(f"{RESULTS}/cifar10_medium/mirrored.json")["rows"]
    for size, rate, row in (
        (1024, 0.005, medium), (1024, 0.01, mirrored), (2048, 0.007, double),
    ):  # fmt: skip
        accuracy = estimate(row["accuracy"])
        yield f"2 | {size} | 150 | NAdam, {rate} | 1 | [{accuracy}]("
    scattering = estimate(dp_sgd("scattering/table1", 2.0)["accuracy"])
    yield f"4096 | 120 | SGD, 0.4 | 0.1 | [{scattering}]("
    for epsilon in (1, 3, 8):
        [row] = read(f"{RESULTS}/prior/epsilon{epsilon}.json")["rows"]
        rate, accuracy = row["label"].rpartition("=")[2], estimate(row["accuracy"])
        yield (
            f"| {epsilon} | {row['expected_batch_size']} | {row['num_steps']} | SGD, {rate} | 0.1 "
            f"| [{accuracy}]("
        )
    clips = {x["label"]: estimate(x["accuracy"]) for x in read(f"{RESULTS}/clip_norm.json")["rows"]}
    label = "dp_sgd clip_norm=10 optimizer.learning_rate="
    yield f"{clips[f'{label}3']} % at a rate of 3 and {clips[f'{label}0.3']} % at 0.3"
    for row in read(f"{RESULTS}/selection/digits.json")["rows"]:  # also in test_selection.py
        yield f"{mean(row['accuracies']):.1f} ± {stdev(row['accuracies']):.1f} %"
    yield f"gain [{gain(double, medium)} points]"
    yield f"gains [{gain(mirrored, medium)} points]"


def finetuning() -> Iterator[str]:
    """What training parts of a network gains and costs."""
    rows = read(f"{RESULTS}/finetuning/cifar10.json")["rows"]
    [everything] = [x for x in rows if x["trained"] == "all"]
    yield f"gained {estimate(everything['gain'])} points"
    last, factors, everything = read("benchmarks/lora_cpu.json")["rows"]
    yield f"takes {last['ms']:.0f} ms per example for the last layer, {factors['ms']:.0f} ms with"
    yield f"{everything['ms']:.0f} ms for everything"
    held = [f"{x['temporary_mb']:.2g}" for x in (last, factors, everything)]
    yield "it holds {}, {} and {} MB".format(*held)


def performance() -> Iterator[str]:
    """Times on the CPU."""
    step = read("benchmarks/step_cpu.json")["observations_ms"]
    views = median(step["dp_sgd_views_ms"]) / median(step["dp_sgd_ms"])
    yield f"With 16 views an example takes {views:.0f} times"
    cheap = zip(step["bam_sam_one_view_ms"], step["dp_sgd_views_ms"], strict=True)
    yield f"takes {median(a / b for a, b in cheap):.2f} times as long as DP-SGD"
    large = read("benchmarks/peers_512_cpu.json")["observations"]
    hours = 900 * 4096 * median(large["ours_dp_sgd"]) / 3.6e6
    yield f"would take {hours:.0f} hours"
    ours, opacus = (median(large[x]) for x in ("ours_dp_sgd", "opacus_hooks"))
    yield f"DP-SGD takes {ours:.0f} in bam and {opacus:.0f} in Opacus"
    ordinary = [
        median(a / b for a, b in zip(x["ours_dp_sgd"], x["ours_nonprivate"], strict=True))
        for x in (large, read("benchmarks/peers_cpu.json")["observations"])
    ]
    yield "takes {:.2f} to {:.2f} times as long as ordinary training".format(*ordinary)
    assert round(opacus / ours) == 3
    yield "In batches of 512 Opacus takes three times as long as bam."
    assert round(reverse_over_exact("cpu")) == 4 and reverse_over_exact("h100") < 1.1
    yield "takes a quarter of reverse-over-reverse on the CPU. On the H100 they hardly differ."
    cold = read("benchmarks/cold.json")["summary"]["resnet9"]
    first = {name: f"{x['to_first_step']['median']:.1f} s" for name, x in cold.items()}
    again = {name: f"{x['changes']['learning_rate']['median']:.2f} s" for name, x in cold.items()}
    yield f"of DP-SGD ends {first['ours_dp_sgd']} after the start of a process in bam"
    yield f"{first['ours_bam_sam']} with BAM-SAM"
    yield f"jax-privacy takes {first['jax_privacy']} and"
    yield f"does not compile, {first['opacus']}."
    yield f"another learning rate takes bam {again['ours_dp_sgd']}"
    yield f"and Opacus {again['opacus']}. jax-privacy takes {again['jax_privacy']} as in"
    yield f"and {again['jax_privacy_arguments']} with numbers made arguments by hand"


def reverse_over_exact(device: str) -> float:
    """How many times as long reverse-over-reverse takes as bam's exact form, at 200 layers."""
    rows = read(f"benchmarks/depth_{device}.json")["rows"]
    ms = {x["method"]: x["median"] for x in rows if x["depth"] == 200}
    return float(ms["bam_reverse"] / ms["bam_exact"])


KINDS = ("Forward", "BackwardFilter")  # of convolutions


def accelerators() -> Iterator[str]:
    """One H100, and estimates of a TPU."""
    run = read("benchmarks/dp_sgd_h100_summary.json")
    yield f"reached {100 * run['test_accuracy']:.2f} % and took {run['seconds'] / 60:.0f} minutes"
    sizes = {
        (x["method"], x["convolution"], x["microbatch"]): x
        for x in read("benchmarks/sizes_h100.json")["rows"]
        if x["views"] == 16
    }
    ms = {key: row["ms"] for key, row in sizes.items()}
    ordinary, private, bam_sam = (
        ms[method, "xla", 64] for method in ("non_private", "dp_sgd", "bam_sam")
    )
    yield f"DP-SGD takes {private / ordinary:.1f} times as long as ordinary training there"
    yield f"BAM {bam_sam / private:.1f} times as long as DP-SGD"
    large, middle, small = (ms["dp_sgd", "xla", size] for size in (256, 64, 16))
    yield f"takes {large:.3f} ms an example"
    yield f"of 256, {middle:.3f} in 64 and {small:.3f} in 16"
    yield f"at {sizes['dp_sgd', 'xla', 256]['tflops']:.0f} of the data sheet's 989 TFLOP/s"
    step = read("benchmarks/step_h100.json")
    yield f"{step['dp_sgd_ms'] / step['nonprivate_ms']:.1f} times as long as ordinary training]"

    def groups(config: str, form: str) -> dict[str, int]:
        """Kind of convolution -> the number of those with groups."""
        answer = read(f"benchmarks/hardware/{config}_dp_sgd_{form}_h100.json")
        assert answer["convolution"] == form
        grouped = [x for x in answer["convolutions"] if x["groups"] > 1]
        return {k: sum(x["count"] for x in grouped if x["kind"] == k) for k in KINDS}

    counts = {config: groups(config, "xla")["Forward"] for config in ("cifar10", "imagenet32")}
    resnet_9, wrn_16_4 = counts.values()
    yield f"all {resnet_9} kernel gradients of ResNet-9 and all {wrn_16_4} of WRN-16-4 forward"
    for config, count in counts.items():
        assert groups(config, "xla") == dict(zip(KINDS, (count, 0), strict=True))
        assert groups(config, "grouped") == dict(zip(KINDS, (0, count), strict=True))

    def estimates(name: str) -> Any:
        return read(f"benchmarks/hardware/{name}_v5e_1x1.json")

    clipped, sam = (estimates(f"cifar10_{x}") for x in ("dp_sgd", "bam_sam"))
    hours = "estimated_hours_per_run"
    yield f"should take {60 * clipped[hours]:.0f} minutes on one TPU v5e"
    yield f"and {60 * sam[hours]:.0f} minutes with BAM"
    seconds = "estimated_seconds_per_step"
    plain, exact = (estimates(f"cifar10_{x}") for x in ("non_private", "bam_exact"))
    for row, above, below in (
        ("| DP-SGD / ordinary training | ≤ 1.10", clipped, plain),
        ("| BAM-SAM / DP-SGD | ≤ 1.90", sam, clipped),
        ("| BAM-exact / DP-SGD | ≤ 2.5", exact, clipped),
    ):
        yield f"{row} | {above[seconds] / below[seconds]:.2f} |"
    share = "estimated_share_of_peak"
    one_view = estimates("cifar10_dp_sgd_views_1")
    yield f"| DP-SGD, share of the peak | ≥ 45 % | {100 * clipped[share]:.0f} % |"
    yield f"| one view, DP-SGD, share of the peak | ≥ 20 % | {100 * one_view[share]:.0f} % |"
    wide = 100 * estimates("imagenet32_dp_sgd")[share]
    yield f"| WRN-16-4, 4 views, DP-SGD, share of the peak | ≥ 35 % | {wide:.0f} % |"
    long = [estimates(f"imagenet32_{x}")[hours] for x in ("dp_sgd", "bam_sam")]
    yield "{:.1f} hours with DP-SGD on one chip and {:.1f} with BAM".format(*long)
    memory = [
        x["memory_bytes"] / 2**30
        for pattern in ("*_h100.json", "*_v5e_1x1.json")
        for path in (ROOT / "benchmarks/hardware").glob(pattern)
        for x in [json.loads(path.read_text(encoding="utf-8"))]
    ]
    assert 14 < max(memory) < 15
    yield "in at most 15 GiB"


def streaming() -> Iterator[str]:
    """Time and memory of data that stay in their files."""
    ratios = [row["ratio"] for row in read("benchmarks/stream_cpu.json")["rows"]]
    yield f"the same within {100 * max(abs(x - 1) for x in ratios):.0f} %"
    found = read("benchmarks/stream_memory_cpu.json")
    yield f"A run on {found['num_examples']:,} images"
    yield f"with {found['file_bytes'] / 1e9:.1f} GB of files"
    yield f"took {found['max_bytes'] / 2**30:.2f} GiB of memory"


SAID = {
    "choose": choices,
    "finetuning": finetuning,
    "performance": performance,
    "accelerators": accelerators,
    "data": streaming,
}


def mistakes(page: str, text: str) -> list[str]:
    """Facts that a page lacks, and intervals that no fact and no generated table has."""
    facts = list(SAID[page]())
    words = " ".join(text.split())
    tables = re.findall(r"<!-- (?:docs|benchmarks)/.*?<!-- end -->", text, re.DOTALL)
    for table in tables:  # which test_performance.py compares with its file
        text = text.replace(table, "")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    known = set(INTERVAL.findall("\n".join(facts)))
    return [x for x in facts if x not in words] + [
        x for x in INTERVAL.findall(text) if x not in known | OTHERS
    ]


@pytest.mark.parametrize("page", SAID)
def test_a_page_says_what_was_measured(page):
    assert mistakes(page, (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("page", "number", "other"),
    [
        ("choose", "62.16 ± 1.12", "62.61 ± 1.12"),
        ("choose", "SGD, 5 |", "SGD, 6 |"),
        ("choose", "3.40 ± 0.66", "3.40 ± 0.33"),
        ("finetuning", "4.23 ± 3.66", "4.32 ± 3.66"),
        ("finetuning", "1.4, 67 and 84", "1.4, 67 and 48"),
        ("performance", "20 hours", "10 hours"),
        ("accelerators", "67.32 %", "67.23 %"),
        ("accelerators", "2.4 times", "1.4 times"),
        ("accelerators", "| 3.21 |", "| 2.21 |"),
        ("performance", "9.75 s", "7.95 s"),
        ("performance", "1.06 to 1.23", "1.06 to 1.32"),
        ("data", "2.06 GiB", "1.06 GiB"),
    ],
)
def test_another_number_would_be_seen(page, number, other):
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert number in text
    assert mistakes(page, text.replace(number, other))
