"""Writes the tables of docs/performance.md from the measurements in benchmarks/.

python -m scripts.benchmarks.performance
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import console
from bam.cli.tables import markdown, number, text
from bam.training import registry
from scripts.lib import pages

_DEVICE = flags.DEFINE_string("device", "cpu", "ending of the files' names")

PAGE = Path("docs/performance.md")
# Key in the peers' JSON file -> what a reader sees
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
# Methods that are measured only there.
LABELS = {"bam_reverse": "BAM (reverse-over-reverse)"}
# Beside others, at batches of 32 and of 512 examples: what is above and below the line.
BATCHES = {"peers": 32, "peers_512": 512}
BESIDE = [
    ("DP-SGD / ours, not private", "ours_dp_sgd", "ours_nonprivate"),
    ("DP-SGD / PyTorch, not private", "ours_dp_sgd", "torch_nonprivate"),
    ("DP-SGD / Opacus's best mode", "ours_dp_sgd", "opacus"),
    ("BAM-SAM / Opacus's best DP-SGD", "ours_bam_sam", "opacus"),
]
# what is compared, JSON file, and its keys of what is above and below the line
RATIOS = [
    ("DP-SGD / jax-privacy `clipped_grad`", "peers", "ours_dp_sgd", "jax_privacy"),
    ("DP-SAT / DP-SGD", "step", "dp_sat_ms", "dp_sgd_ms"),
    ("BAM-SAM / DP-SGD, K = 1", "step", "bam_sam_ms", "dp_sgd_ms"),
    ("BAM-exact / DP-SGD, K = 1", "step", "bam_exact_ms", "dp_sgd_ms"),
    ("BAM-SAM, one-view ascent / DP-SGD, K = 16", "step", "bam_sam_one_view_ms", "dp_sgd_views_ms"),
    ("DP-SGD's arithmetic rate / matrix products' rate", "step", "rate", "matmul"),
    ("peak memory, batch 4096 / batch 256", "step", "memory_4096", "memory_256"),
]


def main() -> None:
    """Rewrites what stands between the page's markers."""
    with console.one_line_errors():
        text = PAGE.read_text(encoding="utf-8")
        files.write_text(PAGE, pages.fill(text, tables_of(Path("benchmarks"), _DEVICE.value)))


def tables_of(folder: Path, device: str) -> dict[str, str]:
    """Every table of the page, by name; what has not been measured says so."""
    measured = {}
    for name in ("step", "peers", "peers_512", "depth"):
        path = folder / f"{name}_{device}.json"
        measured[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    made = {"steps": ("step", _steps), "peers": ("peers", _peers), "depth": ("depth", _depth)}
    missing = "Not measured.\n"
    return {
        "batches": _batches(measured),
        "ratios": _ratios(measured),
        **{
            place: table(measured[n]) if measured[n] else missing
            for place, (n, table) in made.items()
        },
    }


def _observations(files: Mapping[str, Any], file: str, key: str) -> list[float] | None:
    data = files[file]
    if data is None:
        return None
    if file in BATCHES:
        found = data["observations"]
        if key == "opacus":  # the better mode
            modes = ("opacus_hooks", "opacus_ghost")
            key = min(modes, key=lambda mode: statistics.median(found[mode]))
        return list(found[key])
    if key == "rate":
        return [data["flops_per_example"] / ms / 1e6 for ms in data["observations_ms"]["dp_sgd_ms"]]
    if key == "matmul":
        return list(data["matmul_observations_gflops"])
    if key.startswith("memory_"):
        return [data["peak_memory_mb"][key.removeprefix("memory_")]]
    return list(data["observations_ms"][key])


def _ratio(files: Mapping[str, Any], file: str, above: str, below: str) -> list[str]:
    """The median of the ratios round by round, and their quartiles."""
    over, under = _observations(files, file, above), _observations(files, file, below)
    if over is None or under is None:
        return ["not measured", ""]
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return [f"{statistics.median(ratios):.2f}", _spread(ratios)]


def _batches(files: Mapping[str, Any]) -> str:
    rows = [
        [label, *(cell for file in BATCHES for cell in _ratio(files, file, above, below))]
        for label, above, below in BESIDE
    ]
    head = [h for batch in BATCHES.values() for h in (f"batch {batch}", f"quartiles, {batch}")]
    return markdown(text("ratio", *head), rows)


def _ratios(files: Mapping[str, Any]) -> str:
    rows = [[label, *_ratio(files, *what)] for label, *what in RATIOS]
    return markdown(text("ratio", "measured", "quartiles"), rows)


def _steps(data: Any) -> str:
    labels = {
        "nonprivate_ms": "not private",
        "dp_sgd_ms": "DP-SGD",
        "dp_sat_ms": "DP-SAT",
        "bam_sam_ms": "BAM-SAM",
        "bam_exact_ms": "BAM-exact",
        "dp_sgd_views_ms": f"DP-SGD, {data['views']} views",
        "bam_sam_views_ms": f"BAM-SAM, {data['views']} views",
        "bam_sam_one_view_ms": f"BAM-SAM, {data['views']} views, one-view ascent",
    }
    rows = [
        [label, f"{data[key]:.1f}", _spread(data["observations_ms"][key], ".1f")]
        for key, label in labels.items()
        if key in data
    ]
    return markdown(text("step", "ms per example", "quartiles"), rows)


def _peers(data: Any) -> str:
    rows = []
    for name, label in PEERS.items():
        found, error = data["observations"][name], data["clipped_sum_error"].get(name)
        median = f"{statistics.median(found):.1f}"
        rows.append([label, median, _spread(found, ".1f"), number(error, ".0e")])
    return markdown(
        text("step", "ms per example", "quartiles", "clipped sum, relative error"), rows
    )


def _depth(data: Any) -> str:
    methods = list(dict.fromkeys(row["method"] for row in data["rows"]))
    depths = list(dict.fromkeys(row["depth"] for row in data["rows"]))
    found = {(r["depth"], r["method"]): r for r in data["rows"]}
    rows = [
        [
            str(depth),
            *(f"{1e3 * found[depth, m]['median']:.1f}" for m in methods),
            *(f"{found[depth, m]['compile_seconds']:.1f}" for m in ("dp_sgd", "bam_exact")),
        ]
        for depth in depths
    ]
    labels = [f"{LABELS.get(m, registry.label(m))}, ms" for m in methods]
    compiling = ["DP-SGD: compilation, s", "BAM-exact: compilation, s"]
    return markdown(text("layers", *labels, *compiling), rows)


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    if len(values) < 2:
        return "–"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:{form}} to {high:{form}}"


if __name__ == "__main__":
    console.run(main)
