"""Times training from files and of parts of a network; writes the tables of docs/performance.md.

python -m scripts.benchmarks.performance                  the tables, from the files in benchmarks/
python -m scripts.benchmarks.performance --time=NAME      benchmarks/NAME_cpu.json and .md; NAME is
                                                          stream, trainable or lora
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from PIL import Image

from bam import files
from bam.cli import console, tables, timing
from bam.data import datasets, importing, listing, pixels
from bam.files import JsonMapping, JsonObject
from bam.training import registry, trainer
from bam.training.feed import Feed
from configs import cifar10
from configs.finetune import TRAINED
from scripts.lib import pages

_TIME = flags.DEFINE_enum("time", "", ["", "stream", "trainable", "lora"], "what to time, if any")
_DEVICE = flags.DEFINE_string("device", "cpu", "ending of the names of what --time writes")

TRIALS = 7  # rounds through all that is timed
PAGE = Path("docs/performance.md")
ONE_VIEW: JsonObject = {"augment.views": 1, "augment.shift": 0, "augment.flip": "none"}


def main() -> None:
    """Times what `--time` names; without it, rewrites what stands between the page's markers."""
    with console.one_line_errors():
        if not _TIME.value:
            text = PAGE.read_text(encoding="utf-8")
            return files.write_text(PAGE, pages.fill(text, page_tables(Path("benchmarks"))))
        console.use_compilation_cache()
        if _TIME.value == "stream":
            columns, rows = STREAM, time_stream(TRIALS)
        else:
            columns, rows = PARTS, time_parts(NETWORKS[_TIME.value], TRIALS)
        out = f"benchmarks/{_TIME.value}_{_DEVICE.value}"
        timing.keep(Path(f"{out}.json"), {"trials": TRIALS, "rows": rows})
        tables.show(columns, rows, left=("model", "method"), keep=Path(f"{out}.md"))


# What is measured here.


def experiment(method: str, batch: int, changes: JsonMapping, size: int = 32) -> trainer.Trainer:
    """A run on random images in colour, by CIFAR-10's config with these changes of its keys."""
    config = cifar10.get_config(method)
    config.update({"expected_batch_size": batch, "num_steps": 1, "accountant": "rdp"})
    config.update_from_flattened_dict(changes)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2 * batch, size, size, 3), dtype=np.uint8)
    split = datasets.Split(images, rng.integers(0, 10, 2 * batch, dtype=np.int32))
    half = np.full(3, 0.5, np.float32)
    return trainer.build(config, datasets.Dataset("random", split, split, 10, half, half / 2))


def _calls(step: Callable[..., Any], state: Any, batches: Iterator[Any]) -> Callable[[], Any]:
    """A call that takes the next step of a run."""

    def call() -> Any:
        nonlocal state
        state = step(state, *next(batches))
        return state.step

    return call


class Network(NamedTuple):
    """What of a network is trained: name -> regular expression, rank of low-rank factors."""

    model: JsonMapping
    size: int
    batch: int
    methods: Sequence[str]
    parts: Mapping[str, tuple[str, int]]


NETWORKS = {
    "trainable": Network(
        {"name": "resnet9", "width": 16}, 32, 32, ("dp_sgd", "bam_sam"),
        {part: (names.format(head="Dense_0"), 0) for part, names in TRAINED.items()},
    ),
    "lora": Network(
        {"name": "vit_ti16", "width": 1}, 224, 8, ("dp_sgd",),
        {
            "last layer": ("head", 0),
            "low-rank factors (rank 8) and last layer": ("lora|head", 8),
            "all": ("", 0),
        },
    ),
}  # fmt: skip
PARTS: tables.Columns = {
    "trained": lambda row: row["trained"],
    "method": lambda row: row["method"],
    "parameters": lambda row: f"{row['num_params']:,}",
    "ms per example": lambda row: f"{row['ms']:.3f}",
    "quartiles": lambda row: "{:.3f}–{:.3f}".format(*row["quartiles_ms"]),
    "state, MB": lambda row: f"{row['state_mb']:.2f}",
    "held during a step, MB": lambda row: f"{row['temporary_mb']:.2f}",
}


def time_parts(network: Network, trials: int) -> list[JsonObject]:
    """Time and memory of a step that trains the last layer, a part, or all."""
    rows, calls = [], {}
    for (part, (names, rank)), method in itertools.product(network.parts.items(), network.methods):
        changes = {f"model.{key}": value for key, value in network.model.items()} | ONE_VIEW
        changes |= {"trainable": names, "lora.rank": rank, "lora.targets": "qkv|proj|fc"}
        changes["microbatch_size"] = 1
        built = experiment(method, network.batch, changes, network.size)
        compiled, compiling, state, batch = timing.compiled_step(built, network.batch)
        calls[f"{part}, {method}"] = _calls(compiled, state, itertools.repeat(batch))
        row: JsonObject = {"trained": part, "method": method, "compile_seconds": compiling}
        row |= {"num_params": built.num_params, "num_frozen": built.num_frozen}
        row["state_mb"] = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6
        row["temporary_mb"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
        rows.append(row)
    for row, seconds in zip(rows, timing.measure(calls, trials, 1).values(), strict=True):
        row["observations_ms"] = [1e3 * s / network.batch for s in seconds]
        row["ms"], *row["quartiles_ms"] = timing.summarize(row["observations_ms"], 0.0)[:3]
    return rows


STREAMED = {
    "resnet9 at 32 × 32": ("resnet9", 64, 32),
    "WRN-16-4 at 64 × 64": ("wide_resnet", 4, 64),
}
STREAM: tables.Columns = {
    "model": lambda row: row["case"],
    "in memory, s": lambda row: f"{row['device']:.2f}",
    "from files, s": lambda row: f"{row['stream']:.2f}",
    "ratio": lambda row: f"{row['ratio']:.3f}",
    "quartiles": lambda row: "{:.3f}–{:.3f}".format(*row["quartiles"]),
}


def time_stream(
    trials: int, cases: Mapping[str, tuple[str, int, int]] = STREAMED, images: int = 4096
) -> list[JsonObject]:
    """Seconds of a step that reads its images from files, beside one that has them in memory."""
    rows = []
    for case, (name, width, size) in cases.items():
        config = cifar10.get_config("dp_sgd")
        config.model = {"name": name, "width": width}
        config.update({"num_steps": 10_000, "accountant": "rdp", "epsilon": 100.0})
        config.update({"expected_batch_size": 64, "microbatch_size": 1})
        config.update_from_flattened_dict(ONE_VIEW)
        with tempfile.TemporaryDirectory() as folder:
            data = _folder_of_noise(Path(folder), images, size)
            config.dataset.update({"name": "folder", "source": "parquet", "path": str(data)})
            calls = {}
            for memory in ("device", "stream"):
                config.dataset.memory = memory
                built = trainer.build(config.copy_and_resolve_references())
                batches = Feed(built).steps(0, range(1, 10_000))
                calls[memory] = _calls(built.step, built.init(0), batches)
            # What is read ahead while the other trains is a small part of so many steps.
            seconds = timing.measure(calls, trials, repeats=8)
        ratios = [a / b for a, b in zip(seconds["stream"], seconds["device"], strict=True)]
        medians = {memory: statistics.median(values) for memory, values in seconds.items()}
        ratio, *quartiles = timing.summarize(ratios, 0.0)[:3]
        rows.append({"case": case, **medians, "ratio": ratio, "quartiles": quartiles})
    return rows


def _folder_of_noise(folder: Path, num: int, size: int) -> Path:
    rng, classes = np.random.default_rng(0), ("dark", "light")
    for number in range(num):
        place = folder / "images" / classes[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))
        image.save(place / f"{number}.png")
    options = importing.Options(pixels.Preprocessing((size, size), 3), classes, 0.1, strict=True)
    examples = listing.in_class_folders(folder / "images")
    importing.run(folder / "images", examples, folder / "data", options)
    return folder / "data"


# The tables of the page, from this and other commands' files.

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
# What is compared, and the keys of what is above and below the line.
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


def page_tables(folder: Path) -> dict[str, str]:
    """Every table of the page, by its place."""
    names = ("step", "peers", "peers_512", "depth")
    step, *peers, depth = (files.read_json(folder / f"{name}_cpu.json") for name in names)
    beside = [_with_best_of_opacus(x["observations"]) for x in peers]
    observed = beside[0] | step["observations_ms"]
    observed["rate"] = [step["flops_per_example"] / ms / 1e6 for ms in observed["dp_sgd_ms"]]
    observed["matmul"] = step["matmul_observations_gflops"]
    observed |= {f"memory_{size}": [mb] for size, mb in step["peak_memory_mb"].items()}
    batches = [
        [label, *(cell for measured in beside for cell in _ratio(measured, *keys))]
        for label, keys in BESIDE.items()
    ]
    head = [text for x in peers for text in (f"batch {x['batch']}", f"quartiles, {x['batch']}")]
    steps = [
        [label.format(**step), f"{step[key]:.1f}", _spread(step["observations_ms"][key], ".1f")]
        for key, label in STEPS.items()
        if key in step
    ]
    return {
        "batches": _table(("ratio", *head), batches),
        "ratios": _table(
            ("ratio", "measured", "quartiles"),
            [[label, *_ratio(observed, *keys)] for label, keys in RATIOS.items()],
        ),
        "steps": _table(("step", "ms per example", "quartiles"), steps),
        "peers": _peers(peers[0]),
        "depth": _depth(depth["rows"]),
    }


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tables.markdown(tables.text(*headings), rows)


def _with_best_of_opacus(observed: Mapping[str, list[float]]) -> dict[str, list[float]]:
    modes = [observed[mode] for mode in ("opacus_hooks", "opacus_ghost")]
    return {**observed, "opacus": min(modes, key=statistics.median)}


def _ratio(observed: Mapping[str, list[float]], above: str, below: str) -> list[str]:
    """The median of the ratios round by round, and their quartiles."""
    ratios = [a / b for a, b in zip(observed[above], observed[below], strict=True)]
    return [f"{statistics.median(ratios):.2f}", _spread(ratios)]


def _spread(values: list[float], form: str = ".2f") -> str:
    if len(values) < 2:
        return "–"
    _, low, high, _ = timing.summarize(values, 0.0)
    return f"{low:{form}} to {high:{form}}"


def _peers(measured: Any) -> str:
    rows = []
    for name in measured["observations"]:
        observed, error = measured["observations"][name], measured["clipped_sum_error"].get(name)
        median = f"{statistics.median(observed):.1f}"
        rows.append([PEERS[name], median, _spread(observed, ".1f"), tables.number(error, ".0e")])
    return _table(("step", "ms per example", "quartiles", "clipped sum, relative error"), rows)


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
    labels = [f"{LABELS.get(method, registry.label(method))}, ms" for method in methods]
    compiling = ("DP-SGD: compilation, s", "BAM-exact: compilation, s")
    return _table(("layers", *labels, *compiling), lines)


if __name__ == "__main__":
    console.run(main)
