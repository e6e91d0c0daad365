"""Time of a step whose images are read from files, beside one whose images are in memory.

python -m scripts.benchmarks.stream --out=benchmarks/stream_cpu
python -m scripts.benchmarks.stream --gigabytes=20 --folder=DIR --out=benchmarks/stream_memory_cpu

The second trains on so many gigabytes of files, and says how much memory that took.
"""

import io
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from PIL import Image

from bam.cli import console, tables, timing
from bam.data import importing, listing
from bam.training import trainer
from bam.training.feed import Feed
from configs import cifar10

_OUT = flags.DEFINE_string("out", "", "path without extension: .json and .md are written")
_STEPS = flags.DEFINE_integer("steps", 3, "steps of a round", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "of each, in turn", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 64, "expected batch size", lower_bound=1)
_IMAGES = flags.DEFINE_integer("images", 4096, "images of the data set", lower_bound=100)
_GIGABYTES = flags.DEFINE_float("gigabytes", 0.0, "of files to train on; 0: time steps instead", 0)
_FOLDER = flags.DEFINE_string("folder", "", "for those files, which are left there")
console.require("out")

CASES = {"resnet9 at 32 × 32": ("resnet9", 64, 32), "WRN-16-4 at 64 × 64": ("wide_resnet", 4, 64)}
CLASSES = ("dark", "light")
COLUMNS: tables.Columns = {
    "model": lambda row: row["case"],
    "in memory, s": lambda row: f"{row['device']:.2f}",
    "from files, s": lambda row: f"{row['stream']:.2f}",
    "ratio": lambda row: f"{row['ratio']:.3f}",
    "quartiles": lambda row: "{:.3f}–{:.3f}".format(*row["quartiles"]),
}


def main() -> None:
    """Times both in turn, or measures memory, and writes numbers and table."""
    console.use_compilation_cache()
    if _GIGABYTES.value:
        return _memory(Path(_FOLDER.value))
    rows = []
    for case, (name, width, size) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            data = _data(Path(folder), size)
            config = cifar10.get_config("dp_sgd")
            config.update({"num_steps": 10_000, "accountant": "rdp", "epsilon": 100.0})
            config.expected_batch_size, config.microbatch_size = _BATCH.value, 1
            config.model = {"name": name, "width": width}
            config.augment.update({"views": 1, "shift": 0, "flip": "none"})
            config.dataset.update({"name": "folder", "source": "parquet", "path": str(data)})
            timed = {memory: _Steps(config, memory) for memory in ("device", "stream")}
            seconds = [[x.seconds() for x in timed.values()] for _ in range(_ROUNDS.value + 1)]
        measured = np.array(seconds[1:])  # the first compiles
        ratios = measured[:, 1] / measured[:, 0]
        medians = dict(zip(timed, np.median(measured, axis=0).tolist(), strict=True))
        quartiles = np.quantile(ratios, [0.25, 0.75]).tolist()
        ratio = float(np.median(ratios))
        rows.append({"case": case, **medians, "ratio": ratio, "quartiles": quartiles})
    named = {name: flags.FLAGS[name].value for name in ("steps", "rounds", "batch", "images")}
    timing.keep(Path(f"{_OUT.value}.json"), {**named, "rows": rows})
    tables.show(COLUMNS, rows, left=("model",), keep=Path(f"{_OUT.value}.md"))


class _Steps:
    """A training whose steps are timed a few at a time."""

    def __init__(self, config: ConfigDict, memory: str) -> None:
        """Builds it, with `dataset.memory` as said."""
        config = config.copy_and_resolve_references()
        config.dataset.memory = memory
        self.trainer = trainer.build(config)
        self.state = self.trainer.init(0)
        self.steps = Feed(self.trainer).steps(0, range(1, 10_000))

    def seconds(self) -> float:
        """Of a step, with what it waits for; one before is not timed, as its rows are there."""
        self._step()
        started = time.perf_counter()
        for _ in range(_STEPS.value):
            self._step()
        return (time.perf_counter() - started) / _STEPS.value

    def _step(self) -> None:
        self.state = self.trainer.step(self.state, *next(self.steps))
        jax.block_until_ready(self.state.step)


def _memory(folder: Path) -> None:
    """The most memory of a process that trains on large files."""
    num_shards = _large(folder)
    command = [sys.executable, "-m", "bam", "train", "--config=configs/folder.py:dp_sgd"]
    options = {
        "dataset.path": folder, "model.name": "resnet18", "model.width": 8, "num_steps": 8,
        "expected_batch_size": 256, "accountant": "rdp", "microbatch_size": 1, "delta": 1e-6,
    }  # fmt: skip
    command += [f"--config.{key}={value}" for key, value in options.items()]
    with tempfile.TemporaryDirectory() as run:
        done = subprocess.run([*command, f"--workdir={run}/run"], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    facts = {"file_bytes": size, "num_examples": num_shards * importing.SHARD, "max_bytes": used}
    timing.keep(
        Path(f"{_OUT.value}.json"),
        {**facts, "command": " ".join(command[1:]).replace(str(folder), "FOLDER")},
    )
    print(f"{size / 1e9:.1f} GB of files, at most {used / 2**30:.2f} GiB of memory")


def _large(folder: Path) -> int:
    """Writes files of noise of 224 × 224, as an import would, unless they are there."""
    rng, pngs = np.random.default_rng(0), []
    for _ in range(200):
        png = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (224, 224, 3), np.uint8)).save(png, "PNG")
        pngs.append(png.getvalue())
    num_shards = math.ceil(_GIGABYTES.value * 1e9 / len(pngs[0]) / importing.SHARD)
    names = [f"train-{shard:05d}-of-{num_shards:05d}.parquet" for shard in range(num_shards)]
    folder.mkdir(parents=True, exist_ok=True)
    options = importing.Options(224, 3, CLASSES, 0.1, strict=True)
    for name in [*names, "test.parquet"]:
        if not (folder / name).exists():
            chosen = rng.integers(0, len(pngs), importing.SHARD if name in names else 200)
            examples = [listing.Example(f"{i}.png", CLASSES[i % 2]) for i in chosen]
            importing.write([pngs[i] for i in chosen], examples, folder / name, options)
    return num_shards


def _data(folder: Path, size: int) -> Path:
    """An imported folder of noisy images."""
    rng = np.random.default_rng(0)
    for number in range(_IMAGES.value):
        place = folder / "images" / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (size, size, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    images, out = folder / "images", folder / "data"
    options = importing.Options(size, 3, CLASSES, 0.1, strict=True)
    importing.run(images, listing.in_class_folders(images), out, options)
    return out


if __name__ == "__main__":
    console.run(main)
