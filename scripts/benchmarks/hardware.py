"""Compiles the paper's configs for accelerators that are not there; fills docs/accelerators.md.

python -m scripts.benchmarks.hardware    (`make hardware` builds the environments that it needs)

A file in benchmarks/hardware/ for each config, method and target, by `bam hardware`; what is
there already is not compiled again, so it goes on where it was stopped.
"""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import ahead, console, tables
from bam.training import registry
from scripts.lib import pages

_ONLY = flags.DEFINE_string("only", "", "only files whose name contains this")

PAGE, FOLDER = Path("docs/accelerators.md"), Path("benchmarks/hardware")
# DP-SAT's step is DP-SGD's and a shift of the weights: it takes as long, so it has no rows.
METHODS = {name: registry.label(name) for name in registry.METHODS if name != "dp_sat"} | {
    "bam_sam_one_view": f"{registry.label('bam_sam')}, one-view ascent"
}
TARGETS = {
    "cifar10": ("v5e:1x1", "v5e:2x4", "h100", "h100:8"),
    "cifar100": ("v5e:1x1", "h100"),
    "imagenet32": ("v5e:1x1", "v5e:16x16", "h100", "h100:8"),
    "vit": ("v5e:1x1", "h100"),
}
FEW = ("non_private", "dp_sgd", "bam_sam")  # methods that are compiled for many devices
OPTIONS = {
    "bam_sam_one_view": ["--config.method.ascent_views=1"],
    # By low-rank factors, on as many images as ImageNet32 has, of 224 × 224, streamed.
    "vit": ["--config.dataset.name=imagenet32", "--size=224", "--config.delta=7.5e-7"],
}
# File name without suffix -> config, method and target; the quick ones first.
GRID = {
    f"{config}_{method}_{target.replace(':', '_')}": (config, method, target)
    for target in ("h100", "h100:8", "v5e:1x1", "v5e:2x4", "v5e:16x16")
    for config in TARGETS
    for method in (METHODS if target in ("h100", "v5e:1x1") else FEW)
    if target in TARGETS[config] and (config != "vit" or method == "dp_sgd")
}
Answers = Mapping[str, Mapping[str, Any]]
Columns = dict[str, Callable[[Mapping[str, Any]], str]]


def main() -> None:
    """Compiles what is missing, then writes the page's tables."""
    with console.one_line_errors():
        for name in GRID:
            if _ONLY.value in name and not (FOLDER / f"{name}.json").exists():
                print(name, _compile(name) or "compiled", flush=True)
        text = PAGE.read_text(encoding="utf-8")
        files.write_text(PAGE, pages.fill(text, tables_of(read(FOLDER))))


def _compile(name: str) -> str:
    """Has `bam hardware` write the file; returns what went wrong."""
    config, method, target = GRID[name]
    python = f".venv-{ahead.kind_of(target).platform}/bin/python"
    arguments = [
        f"--config=configs/{config}.py:{method.removesuffix('_one_view')}",
        f"--target={target}",
        f"--json={FOLDER / name}.json",
        "--config.precision=bfloat16",
        *OPTIONS.get(method, []),
        *OPTIONS.get(config, []),
    ]
    try:
        done = subprocess.run(
            [python, "-m", "bam", "hardware", *arguments], capture_output=True, text=True
        )
    except OSError as error:
        raise ValueError(f"{python} cannot be started ({error}): run `make hardware`") from None
    return f"FAILED: {done.stderr[-300:]}" if done.returncode else ""


def read(folder: Path) -> Answers:
    """Every file that is there, by its name."""
    kept = {name: folder / f"{name}.json" for name in GRID}
    return {name: json.loads(x.read_text("utf-8")) for name, x in kept.items() if x.exists()}


def tables_of(answers: Answers) -> dict[str, str]:
    """The tables of the page; what was not compiled says so."""
    return {
        "tpu": _table("tpu", answers, COLUMNS | TPU_COLUMNS),
        "gpu": _table("cuda", answers, COLUMNS),
    }


def _table(platform: str, answers: Answers, columns: Columns) -> str:
    rows = []
    for name, (config, method, target) in GRID.items():
        if ahead.kind_of(target).platform == platform:
            cells = ["not run" if name not in answers else "does not compile"] * len(columns)
            if answers.get(name, {}).get("compiles"):
                cells = [show(answers[name]) for show in columns.values()]
            rows.append([config, METHODS[method], f"`{target}`", *cells])
    headings = tables.text("config", "method", "target", *columns)
    return tables.markdown(headings, rows, ("method", "target"))


def _sums(answer: Mapping[str, Any]) -> str:
    sums = [f"{x['count']:g} × {x['bytes'] / 1e6:.3g} MB" for x in answer["collectives"]]
    return ", ".join(sums) or "–"


COLUMNS: Columns = {
    "microbatch": lambda a: str(a["microbatch_size"]),
    "memory, GiB": lambda a: f"{a['memory_bytes'] / 2**30:.1f}" + ("" if a["fits"] else "!"),
    "all-reduce": _sums,
}
TPU_COLUMNS: Columns = {
    "s per step": lambda a: f"{a['estimated_seconds_per_step']:.3g}",
    "of peak": lambda a: f"{a['estimated_share_of_peak']:.0%}",
    "h per run": lambda a: f"{a['estimated_hours_per_run']:.3g}",
    "device-hours": lambda a: f"{a['estimated_device_hours_per_run']:.3g}",
}


if __name__ == "__main__":
    console.run(main)
