"""Compiles the paper's configs for accelerators that are not there; fills docs/accelerators.md.

python -m scripts.benchmarks.hardware    (`make hardware` builds the environments that it needs)

A file in benchmarks/hardware/ for each config, method and target, by `bam hardware`; what is
there already is not compiled again, so it goes on where it was stopped.
"""

import subprocess
from pathlib import Path

from bam import files
from bam.cli import ahead, console, tables
from bam.training import registry
from scripts.lib import pages

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
COLUMNS: tables.Columns = {
    "microbatch": lambda a: str(a["microbatch_size"]),
    "memory, GiB": lambda a: f"{a['memory_bytes'] / 2**30:.1f}" + ("" if a["fits"] else "!"),
    "all-reduce": lambda a: (
        ", ".join(f"{x['count']:g} × {x['bytes'] / 1e6:.3g} MB" for x in a["collectives"]) or "–"
    ),
}
TPU_COLUMNS: tables.Columns = {
    "s per step": lambda a: f"{a['estimated_seconds_per_step']:.3g}",
    "of peak": lambda a: f"{a['estimated_share_of_peak']:.0%}",
    "h per run": lambda a: f"{a['estimated_hours_per_run']:.3g}",
    "device-hours": lambda a: f"{a['num_devices'] * a['estimated_hours_per_run']:.3g}",
}


def main() -> None:
    """Compiles what is missing, then writes the page's tables."""
    with console.one_line_errors():
        for name in GRID:
            if not (FOLDER / f"{name}.json").exists():
                done = subprocess.run(_command(name), capture_output=True, text=True)
                print(name, done.stderr[-300:] if done.returncode else "compiled", flush=True)
        text = PAGE.read_text(encoding="utf-8")
        files.write_text(PAGE, pages.fill(text, page_tables(FOLDER)))


def _command(name: str) -> list[str]:
    """What writes a file of the grid."""
    config, method, target = GRID[name]
    python = f".venv-{ahead.kind_of(target).platform}/bin/python"
    command = [python, "-m", "bam", "hardware", f"--target={target}"]
    command += [f"--config=configs/{config}.py:{method.removesuffix('_one_view')}"]
    command += [f"--json={FOLDER / name}.json", "--config.precision=bfloat16"]
    return command + OPTIONS.get(method, []) + OPTIONS.get(config, [])


def page_tables(folder: Path) -> dict[str, str]:
    """The tables of the page; dashes for what was not run or does not compile."""
    columns = {"tpu": {**COLUMNS, **TPU_COLUMNS}, "gpu": COLUMNS}
    rows: dict[str, list[list[str]]] = {place: [] for place in columns}
    for name, (config, method, target) in GRID.items():
        place, file = "gpu" if target.startswith("h100") else "tpu", folder / f"{name}.json"
        answer = files.read_json(file) if file.exists() else {"compiles": False}
        cells = [show(answer) if answer["compiles"] else "–" for show in columns[place].values()]
        rows[place].append([config, METHODS[method], f"`{target}`", *cells])
    return {
        place: tables.markdown(
            tables.text("config", "method", "target", *columns[place]),
            rows[place],
            ("method", "target"),
        )
        for place in columns
    }


if __name__ == "__main__":
    console.run(main)
