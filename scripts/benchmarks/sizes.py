"""Time per drawn example of CIFAR-10's step by method, convolution, microbatch size and views.

python -m scripts.benchmarks.sizes --out=benchmarks/sizes_h100 --seconds=300

It writes OUT.json and OUT.md, without the settings for which no time was left.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bam import files, models, tables, waits
from bam.cli import command, jax_setup, screen
from bam.files import JsonObject
from bam.training import methods
from scripts.benchmarks import arithmetic, performance, timing

_OUT = flags.DEFINE_string("out", "", "path without extension: .json and .md are written")
_SECONDS = flags.DEFINE_float("seconds", 540, "time for all settings", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 1024, "expected examples per step", lower_bound=1)
_PRECISION = flags.DEFINE_enum("precision", "bfloat16", models.PRECISIONS, "network's arithmetic")
_WIDTH = flags.DEFINE_integer("width", 64, "width of ResNet-9", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 3, "rounds that are timed; the fastest counts", 1)

LEAST_SECONDS = 25  # a setting starts only if this many are left
# Method, convolution, microbatch size, views; the most informative settings first.
SETTINGS = (
    ("dp_sgd", "xla", 64, 16), ("dp_sgd", "matmul", 64, 16), ("non_private", "xla", 64, 16),
    ("dp_sgd", "xla", 16, 16), ("dp_sgd", "xla", 256, 16), ("bam_sam", "xla", 64, 16),
    ("dp_sgd", "matmul", 16, 16), ("dp_sgd", "matmul", 256, 16), ("dp_sgd", "tpu", 64, 16),
    ("non_private", "matmul", 64, 16), ("dp_sgd", "xla", 512, 1), ("dp_sgd", "matmul", 512, 1),
    ("non_private", "xla", 512, 1), ("dp_sgd", "matmul", 64, 1), ("dp_sgd", "matmul", 4, 16),
    ("dp_sgd", "xla", 4, 16), ("bam_sam", "matmul", 64, 16),
)  # fmt: skip
COLUMNS: tables.Columns = {
    "method": lambda row: methods.label(row["method"]),
    "views": lambda row: str(row["views"]),
    "convolution": lambda row: row["convolution"],
    "microbatch": lambda row: str(row["microbatch"]),
    "rows per example": lambda row: f"{row['rows_per_example']:.2f}",
    "ms per example": lambda row: f"{row['ms']:.3f}",
    "gradients' TFLOP/s": lambda row: f"{row['tflops']:.0f}",
}


def main() -> None:
    """Compiles and times one setting after another until the seconds are over."""
    jax_setup.use_compilation_cache()
    ends, rows = time.monotonic() + _SECONDS.value, []
    for setting in SETTINGS:
        if time.monotonic() > ends - LEAST_SECONDS:
            break
        rows.append(row := _time_setting(*setting))
        screen.say("  ".join(show(row) for show in COLUMNS.values()))
    out = Path(_OUT.value)
    names = ("batch", "precision", "width", "trials")
    timing.keep(out.with_suffix(".json"), {x: flags.FLAGS[x].value for x in names} | {"rows": rows})
    files.write_text(out.with_suffix(".md"), table(rows))


def table(rows: Sequence[JsonObject]) -> str:
    """The rows in Markdown, grouped by method and views, the fastest of a group first."""
    groups = list(dict.fromkeys((row["method"], row["views"]) for row in rows))
    ordered = sorted(rows, key=lambda x: (groups.index((x["method"], x["views"])), x["ms"]))
    cells = [[show(row) for show in COLUMNS.values()] for row in ordered]
    return tables.markdown(tables.text(*COLUMNS), cells, ("method", "convolution"))


def _time_setting(method: str, convolution: str, microbatch: int, views: int) -> dict[str, Any]:
    """A setting's row: milliseconds per drawn example in the fastest round, and arithmetic rate."""
    changes: JsonObject = {
        "augment.views": views, "microbatch_size": microbatch, "convolution": convolution,
        "precision": _PRECISION.value, "model.width": _WIDTH.value,
    }  # fmt: skip
    changes = (performance.ONE_VIEW if views == 1 else {}) | changes
    with waits.compiling(screen.show, f"{method} with {convolution}, {microbatch}, {views}"):
        built = performance.experiment(method, _BATCH.value, changes)
        steps = timing.steps_of(built)
    seconds = timing.measure({"steps": steps.take}, _TRIALS.value, repeats=1)["steps"]
    ms = steps.ms_per_example(min(seconds))
    flop = arithmetic.flop_per_step(built.config, built.dataset) / _BATCH.value
    return {
        "method": method, "convolution": convolution, "microbatch": microbatch, "views": views,
        "capacity": steps.capacity, "drawn": steps.drawn,
        "rows_per_example": steps.rows_per_example,
        "ms": ms, "tflops": flop / ms / 1e9,
    }  # fmt: skip


if __name__ == "__main__":
    command.run_script(main, ["out"])
