"""Compiles the paper's configs for accelerators that are not there; fills docs/accelerators.md.

python -m scripts.benchmarks.hardware    (`make hardware` builds the environments that it needs)

A file in benchmarks/hardware/ for each config, method and target, by `bam hardware`; what is
there already is not compiled again, so it goes on where it was stopped.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from bam import files
from bam.cli import console, tables, targets
from bam.training import registry
from scripts.lib import pages

_ONLY = flags.DEFINE_string("only", "", "only files whose name contains this")
_PYTHON = {
    platform: flags.DEFINE_string(
        f"{platform}_python", f".venv-{platform}/bin/python", f"has the {platform} compiler"
    )
    for platform in ("tpu", "cuda")
}
_PROGRAMS = flags.DEFINE_string("programs", "", "folder for the compiled programs; '': not kept")
_TABLES = flags.DEFINE_bool("tables", False, "compile nothing, write the page")

PAGE, FOLDER = Path("docs/accelerators.md"), Path("benchmarks/hardware")
PRECISION = "bfloat16"
ONE_VIEW = "bam_sam_one_view"
# DP-SAT's step is DP-SGD's and a shift of the weights: it takes as long, so it has no rows.
METHODS: dict[str, list[str]] = {name: [] for name in registry.METHODS if name != "dp_sat"} | {
    ONE_VIEW: ["--config.method.ascent_views=1"]
}
LARGE, FEW = ("h100:8", "v5e:2x4", "v5e:16x16"), ("non_private", "dp_sgd", "bam_sam")
TARGETS = {
    "cifar10": ("v5e:1x1", "v5e:2x4", "h100", "h100:8"),
    "cifar100": ("v5e:1x1", "h100"),
    "imagenet32": ("v5e:1x1", "v5e:16x16", "h100", "h100:8"),
}


# ViT-S by low-rank factors, on as many images as ImageNet32 has, of 224 × 224, streamed.
OF_VIT = ["--config.dataset.name=imagenet32", "--size=224", "--config.delta=7.5e-7"]


class Row(NamedTuple):
    """One compilation: a config of configs/, a method, a target, and further flags."""

    config: str
    method: str
    target: str
    name: str
    options: list[str]


Answers = Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Compiles what is missing, then writes the page's tables."""
    with console.one_line_errors():
        missing = [row for row in grid() if not (FOLDER / f"{row.name}.json").exists()]
        todo = [row for row in missing if _ONLY.value in row.name and not _TABLES.value]
        for number, row in enumerate(todo, start=1):
            print(f"{number} of {len(todo)}: {row.name}", end=" ", flush=True)
            print(_compile(row, FOLDER / f"{row.name}.json"), flush=True)
        answers = read(FOLDER)
        text = PAGE.read_text(encoding="utf-8")
        files.write_text(PAGE, pages.fill(text, tables_of(answers)))


def grid() -> Iterator[Row]:
    """Every compilation, the quick ones first."""
    for target in ("h100", "h100:8", "v5e:1x1", "v5e:2x4", "v5e:16x16"):
        for config, wanted in TARGETS.items():
            for method in METHODS if target in wanted else ():
                if target not in LARGE or method in FEW:
                    yield _row(config, method, target)
        if target == "v5e:1x1":
            yield _row("cifar10", "dp_sgd", target, views=1)
        if target not in LARGE:
            yield Row("vit", "dp_sgd", target, f"vit_dp_sgd_{target.replace(':', '_')}", OF_VIT)


def _row(config: str, method: str, target: str, views: int = 0) -> Row:
    """`views` other than the config's are part of the file's name."""
    mark = [f"views_{views}"] if views else []
    options = [f"--config.augment.views={views}"] if views else []
    name = "_".join([config, method, *mark, target.replace(":", "_")])
    return Row(config, method, target, name, METHODS[method] + options)


def _compile(row: Row, path: Path) -> str:
    """Has `bam hardware` write the file; returns a word on how it went."""
    started = time.perf_counter()
    python = _PYTHON[targets.kind_of(row.target).platform].value
    method = row.method.removesuffix("_one_view")
    command = [python, "-m", "bam", "hardware", f"--config=configs/{row.config}.py:{method}"]
    command += [f"--target={row.target}", f"--json={path}", f"--config.precision={PRECISION}"]
    if _PROGRAMS.value:
        command += [f"--program={Path(_PROGRAMS.value) / row.name}.txt"]
    try:
        done = subprocess.run(command + row.options, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{python} cannot be started ({error}): run `make hardware`") from None
    seconds = time.perf_counter() - started
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        return f"FAILED: {(said or done.stderr.splitlines() or ['no word'])[-1]}"
    return f"{seconds:.0f} s"


def read(folder: Path) -> Answers:
    """Every file that is there, by its name."""
    return {
        row.name: json.loads(path.read_text(encoding="utf-8"))
        for row in grid()
        if (path := folder / f"{row.name}.json").exists()
    }


def tables_of(answers: Answers) -> dict[str, str]:
    """The tables of the page; what was not compiled says so."""
    found = [(row, answers.get(row.name)) for row in grid() if "_views_" not in row.name]
    by_platform = {
        platform: [x for x in found if targets.kind_of(x[0].target).platform == platform]
        for platform in _PYTHON
    }
    return {
        "goals": _goals(answers),
        "places": _places(answers),
        "tpu": tables.markdown(COLUMNS | TPU_COLUMNS, by_platform["tpu"], ("method", "target")),
        "gpu": tables.markdown(COLUMNS | GPU_COLUMNS, by_platform["cuda"], ("method", "target")),
    }


def _cell(show: Callable[[Mapping[str, Any]], str]) -> Callable[[Any], str]:
    """What a column shows of a pair of a row and its answer."""

    def cell(pair: tuple[Row, Mapping[str, Any] | None]) -> str:
        answer = pair[1]
        if answer is None:
            return "not run"
        return show(answer) if answer["compiles"] else "does not compile"

    return cell


def _label(method: str) -> str:
    return (
        f"{registry.label('bam_sam')}, one-view ascent"
        if method == ONE_VIEW
        else registry.label(method)
    )


def _sums(answer: Mapping[str, Any]) -> str:
    found = [f"{x['count']:g} × {x['bytes'] / 1e6:.3g} MB" for x in answer["collectives"]]
    return ", ".join(found) or "–"


COLUMNS: dict[str, Callable[[Any], str]] = {
    "config": lambda pair: pair[0].config,
    "method": lambda pair: _label(pair[0].method),
    "target": lambda pair: f"`{pair[0].target}`",
    "microbatch": _cell(lambda a: str(a["microbatch_size"])),
    "memory, GiB": _cell(lambda a: f"{a['memory_bytes'] / 2**30:.1f}" + ("" if a["fits"] else "!")),
    "all-reduce": _cell(_sums),
}
TPU_COLUMNS: dict[str, Callable[[Any], str]] = {
    "s per step": _cell(lambda a: f"{a['estimated_seconds_per_step']:.3g}"),
    "of peak": _cell(lambda a: f"{a['estimated_share_of_peak']:.0%}"),
    "h per run": _cell(lambda a: f"{a['estimated_hours_per_run']:.3g}"),
    "device-hours": _cell(lambda a: f"{a['estimated_device_hours_per_run']:.3g}"),
}
GPU_COLUMNS: dict[str, Callable[[Any], str]] = {
    "kernels per step": _cell(lambda a: f"{a['kernels_per_step']:,.0f}"),
    "GB moved per step": _cell(lambda a: f"{a['memory_traffic_bytes_per_step'] / 1e9:,.0f}"),
    "s per step, at least": _cell(lambda a: f"{a['estimated_seconds_per_step']:.3g}"),
    "h per run, at least": _cell(lambda a: f"{a['estimated_hours_per_run']:.3g}"),
}
# What was aimed at, and how it is computed from the answers for one v5e chip.
GOALS: list[tuple[str, str, str, str, str]] = [
    # what, goal, of 0.1.0, above and below the line ("": the share of the peak)
    ("DP-SGD, share of peak", "≥ 45%", "21%", "cifar10_dp_sgd", ""),
    ("DP-SGD / ordinary training", "≤ 1.10", "1.36", "cifar10_dp_sgd", "cifar10_non_private"),
    ("BAM-SAM / DP-SGD", "≤ 1.90", "1.98", "cifar10_bam_sam", "cifar10_dp_sgd"),
    ("BAM-SAM, one-view ascent / DP-SGD", "≤ 1.15", "–", f"cifar10_{ONE_VIEW}", "cifar10_dp_sgd"),
    ("BAM-exact / DP-SGD", "≤ 2.5", "3.10", "cifar10_bam_exact", "cifar10_dp_sgd"),
    ("K = 1, DP-SGD, share of peak", "≥ 20%", "5%", "cifar10_dp_sgd_views_1", ""),
    ("once per step, share of cycles", "≤ 2%", "–", "cifar10_dp_sgd", "outside"),
    ("WRN-16-4, 4 views, DP-SGD, share of peak", "≥ 35%", "–", "imagenet32_dp_sgd", ""),
]


def _goals(answers: Answers) -> str:
    def value(above: str, below: str) -> str:
        over, under = answers.get(f"{above}_v5e_1x1"), answers.get(f"{below}_v5e_1x1")
        if over is None or (under is None and below not in ("", "outside")):
            return "not run"
        if not all(x["compiles"] for x in (over, under) if x):
            return "does not compile"
        if below == "":
            return f"{over['estimated_share_of_peak']:.0%}"
        if below == "outside":
            once = over["cycles_by_place"]["once per step"]
            return f"{once / over['estimated_cycles_per_step']:.2%}"
        assert under is not None
        return f"{over['estimated_cycles_per_step'] / under['estimated_cycles_per_step']:.2f}"

    rows = [[what, old, goal, value(above, below)] for what, goal, old, above, below in GOALS]
    return tables.markdown(tables.text("estimate", "0.1.0", "goal", "now"), rows)


def _places(answers: Answers) -> str:
    """Where the cycles of one v5e chip go."""
    shown = {
        "CIFAR-10, ordinary": "cifar10_non_private",
        "CIFAR-10, DP-SGD": "cifar10_dp_sgd",
        "CIFAR-10, BAM-exact": "cifar10_bam_exact",
        "CIFAR-10, DP-SGD, K = 1": "cifar10_dp_sgd_views_1",
        "ImageNet32, DP-SGD": "imagenet32_dp_sgd",
    }
    found = {label: answers.get(f"{name}_v5e_1x1") for label, name in shown.items()}
    places = dict.fromkeys(p for a in found.values() if a for p in a.get("cycles_by_place", ()))
    rows = []
    for label, answer in found.items():
        cells = ["not run"] * len(places)
        if answer and answer["compiles"]:
            total, cycles = answer["estimated_cycles_per_step"], answer["cycles_by_place"]
            cells = [f"{cycles.get(place, 0) / total:.0%}" for place in places]
        rows.append([label, *cells])
    return tables.markdown(tables.text("share of the cycles", *places), rows)


if __name__ == "__main__":
    console.run(main)
