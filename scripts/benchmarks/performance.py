"""Writes the tables of docs/performance.md from the JSON files in benchmarks/.

python -m scripts.benchmarks.performance
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bam import files, tables
from bam.cli import command
from bam.data import datasets
from bam.files import JsonMapping, JsonObject
from bam.training import loop, trainer
from bam.training.methods import label
from configs import cifar10
from scripts.benchmarks import cold_case, timing
from scripts.lib import pages

PAGE = Path("docs/performance.md")
ONE_VIEW: JsonObject = {"augment.views": 1, "augment.shift": 0, "augment.flip": "none"}


def main() -> None:
    """Rewrites the tables between the page's markers."""
    text = PAGE.read_text(encoding="utf-8")
    files.write_text(PAGE, pages.fill(text, page_tables(Path("benchmarks"))))


def experiment(method: str, batch: int, changes: JsonMapping) -> trainer.Trainer:
    """A run on random colour images, with CIFAR-10's config and these changes of its keys."""
    config = cifar10.get_config(method)
    config.update({"expected_batch_size": batch, "num_steps": 1, "accountant": "rdp"})
    config.update_from_flattened_dict(changes)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2 * batch, 32, 32, 3), dtype=np.uint8)
    split = datasets.Split(images, rng.integers(0, 10, 2 * batch, dtype=np.int32))
    half = np.full(3, 0.5, np.float32)
    return loop.build(config, datasets.Dataset("random", split, split, 10, half, half / 2))


# Key in the peers' JSON file -> its name for readers.
PEERS = {
    "ours_nonprivate": "ours, not private",
    "ours_dp_sgd": "ours, DP-SGD",
    "ours_bam_sam": "ours, BAM-SAM",
    "jax_vmap": "JAX, vmap of grad (DP-SGD as in a textbook)",
    "jax_loop": "JAX, one example at a time in a Python loop",
    "jax_privacy": "jax-privacy, clipped_grad",
    "jax_privacy_matmul": "jax-privacy, clipped_grad, our convolutions",
    "torch_nonprivate": "PyTorch, not private",
    "torch_loop": "PyTorch, one example at a time in a Python loop",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost clipping",
}
# Labels of methods that only `depth` measures.
LABELS = {"bam_reverse": "BAM (reverse-over-reverse)"}
# Ratio -> keys of its numerator and its denominator.
BESIDE = {
    "DP-SGD / ours, not private": ("ours_dp_sgd", "ours_nonprivate"),
    "DP-SGD / PyTorch, not private": ("ours_dp_sgd", "torch_nonprivate"),
    "DP-SGD / Opacus's best mode": ("ours_dp_sgd", "opacus"),
    "BAM-SAM / Opacus's best DP-SGD": ("ours_bam_sam", "opacus"),
}
RATIOS = {
    "DP-SGD / jax-privacy `clipped_grad`": ("ours_dp_sgd", "jax_privacy"),
    "DP-SAT / DP-SGD": ("dp_sat_ms", "dp_sgd_ms"),
    "BAM-SAM / DP-SGD, K = 1": ("bam_sam_ms", "dp_sgd_ms"),
    "BAM-exact / DP-SGD, K = 1": ("bam_exact_ms", "dp_sgd_ms"),
    "BAM-SAM, one-view ascent / DP-SGD, K = 16": ("bam_sam_one_view_ms", "dp_sgd_views_ms"),
    "DP-SGD's arithmetic rate / matrix products' rate": ("rate", "matmul"),
    "peak memory, batch 4096 / batch 256": ("memory_4096", "memory_256"),
}
STEPS = {
    "nonprivate_ms": "not private",
    "dp_sgd_ms": "DP-SGD",
    "dp_sat_ms": "DP-SAT",
    "bam_sam_ms": "BAM-SAM",
    "bam_exact_ms": "BAM-exact",
    "dp_sgd_views_ms": "DP-SGD, {views} views",
    "bam_sam_views_ms": "BAM-SAM, {views} views",
    "bam_sam_one_view_ms": "BAM-SAM, {views} views, one-view ascent",
}


# Number that another setting changes -> its name for readers.
CHANGES = {"learning_rate": "rate", "clip_norm": "C", "noise_multiplier": "σ", "radius": "r"}
AGAIN = tuple(f"another {name}" for name in CHANGES.values())
NOT_RUN = "not run"


def page_tables(folder: Path) -> dict[str, str]:
    """Marker on the page -> table."""
    names = ("step", "peers", "peers_512", "depth")
    step, *peers, depth = (files.read_json(folder / f"{name}_cpu.json") for name in names)
    step_h100, depth_h100 = (files.read_json(folder / f"{x}_h100.json") for x in ("step", "depth"))
    beside = [_with_best_of_opacus(x["observations"]) for x in peers]
    observed = beside[0] | step["observations_ms"]
    observed["rate"] = [step["flops_per_example"] / ms / 1e6 for ms in observed["dp_sgd_ms"]]
    observed["matmul"] = step["matmul_observations_gflops"]
    observed |= {f"memory_{size}": [mb] for size, mb in step["peak_memory_mb"].items()}
    head = [text for x in peers for text in (f"batch {x['batch']}", f"quartiles, {x['batch']}")]
    return {
        "batches": _table(
            ("ratio", *head),
            [
                [label, *(cell for observed in beside for cell in _ratio(observed, *keys))]
                for label, keys in BESIDE.items()
            ],
        ),
        "ratios": _table(
            ("ratio", "measured", "quartiles"),
            [[label, *_ratio(observed, *keys)] for label, keys in RATIOS.items()],
        ),
        "steps": _steps(step, ".1f"),
        "steps_h100": _steps(step_h100, ".3f"),
        "peers": _table(
            ("step", "ms per example", "quartiles", "clipped sum, relative error"),
            [
                [PEERS[name], *_median(observed, ".1f"), tables.number(errors.get(name), ".0e")]
                for errors in [peers[0]["clipped_sum_error"]]
                for name, observed in peers[0]["observations"].items()
            ],
        ),
        "depth": _depth(depth["rows"]),
        "depth_h100": _depth(depth_h100["rows"]),
        **cold_tables(folder / "cold.json"),
    }


def cold_tables(file: Path) -> dict[str, str]:
    """Marker -> table of first steps; a case that the file lacks is "not run"."""
    summary = files.read_json(file)["summary"] if file.exists() else {}
    seconds = {f"cold_{x}": _cold_seconds(summary.get(x, {})) for x in cold_case.NETWORKS}
    return seconds | {"cold_programs": _cold_programs(summary.get("resnet9", {}))}


def _cold_seconds(summary: JsonMapping) -> str:
    """Seconds of one network to its first step, and to the first step of another setting."""

    def figures(case: JsonMapping, changes: Sequence[str]) -> list[str]:
        phases, total = case["phases"], case["to_first_step"]
        medians = [phases[name]["median"] for name in ("import", "build", "first_step")]
        return [
            *(f"{x:.1f}" for x in (*medians, total["median"])),
            f"{total['low']:.1f} to {total['high']:.1f}",
            *(f"{case['changes'][x]['median']:.2f}" if x in changes else "–" for x in CHANGES),
        ]

    head = ("case", "import", "build", "first step", "in all", "quartiles", *AGAIN)
    return _cold(summary, head, figures)


def _cold_programs(summary: JsonMapping) -> str:
    """Number of programs that XLA compiles, and its seconds before the first step."""

    def figures(case: JsonMapping, changes: Sequence[str]) -> list[str]:
        phases = case["phases"]
        first = phases["first_step"]
        return [
            f"{first['compilations']:.0f}",
            f"{first['xla_seconds']:.1f}",
            *(f"{phases[x]['compilations']:.0f}" if x in changes else "–" for x in CHANGES),
        ]

    return _cold(summary, ("case", "first step", "XLA, s", *AGAIN), figures)


def _cold(
    summary: JsonMapping,
    head: Sequence[str],
    figures: Callable[[JsonMapping, Sequence[str]], list[str]],
) -> str:
    """A table with a row for every case, and for each measured case of another checkout."""
    rows = []
    for key in dict.fromkeys([*cold_case.CASES, *summary]):
        case = cold_case.case_of(key)
        cells = [NOT_RUN] * (len(head) - 1)
        if key in summary:
            cells = figures(summary[key], case.changes)
        rows.append([case.label, *cells])
    return _table(head, rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tables.markdown(tables.text(*headings), rows)


def _with_best_of_opacus(observed: Mapping[str, list[float]]) -> dict[str, list[float]]:
    modes = [observed[mode] for mode in ("opacus_hooks", "opacus_ghost")]
    return {**observed, "opacus": min(modes, key=statistics.median)}


def _ratio(observed: Mapping[str, list[float]], above: str, below: str) -> list[str]:
    """Median and quartiles of the ratio, taken in each round."""
    return _median([a / b for a, b in zip(observed[above], observed[below], strict=True)], ".2f")


def _median(values: list[float], form: str) -> list[str]:
    """The median and, if there are several values, the quartiles."""
    median, low, high, _ = timing.summarize(values, 0.0)
    return [f"{median:{form}}", f"{low:{form}} to {high:{form}}" if len(values) > 1 else "–"]


def _steps(step: JsonMapping, form: str) -> str:
    rows = [
        [label.format(**step), *_median(step["observations_ms"][key], form)]
        for key, label in STEPS.items()
    ]
    return _table(("step", "ms per example", "quartiles"), rows)


def _depth(rows: Sequence[JsonMapping]) -> str:
    methods, depths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "depth"))
    cells = {(row["depth"], row["method"]): row for row in rows}
    lines = [
        [
            str(depth),
            *(f"{1e3 * cells[depth, method]['median']:.1f}" for method in methods),
            *(f"{cells[depth, m]['compile_seconds']:.1f}" for m in ("dp_sgd", "bam_exact")),
        ]
        for depth in depths
    ]
    labels = [f"{LABELS.get(method, label(method))}, ms" for method in methods]
    compiling = ("DP-SGD: compilation, s", "BAM-exact: compilation, s")
    return _table(("layers", *labels, *compiling), lines)


if __name__ == "__main__":
    command.run_script(main)
