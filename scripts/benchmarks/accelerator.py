"""All that is to be measured on an accelerator, in pieces, going on where it was stopped.

python -m scripts.benchmarks.accelerator --device=h100 --workdir=runs/accelerator --seconds=540 \
  --data=FOLDER

In this order: tests of what a device computes, times of a step, of its settings and of depths,
other libraries where they are installed, CIFAR-10 at the paper's scale by DP-SGD and BAM at ε = 2.
A command has the seconds that are left; what is cut off is begun again by the next call, and a
training goes on.
FOLDER holds CIFAR-10 in Parquet.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from absl import flags

from bam import files
from bam.cli import console
from scripts.benchmarks import timing

_DEVICE = flags.DEFINE_string("device", "", "in the names of results, for example h100")
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for runs, logs and what is done")
_OUT = flags.DEFINE_string("out", "benchmarks", "folder for results")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet; '': no training")
_SECONDS = flags.DEFINE_float("seconds", 540, "for this call", lower_bound=1)
console.require("device", "workdir")

TESTS = (
    "chacha", "exact_sums", "engine", "grid", "oracles", "position", "properties",
    "sampling", "transforms", "devices", "audit",
)  # fmt: skip
# What a step is timed of -> the module that it needs.
OTHERS = dict.fromkeys(("ours_nonprivate", "ours_dp_sgd", "ours_bam_sam", "jax_vmap"), "bam")
OTHERS |= {"jax_privacy": "jax_privacy", "torch_nonprivate": "torch"}
OTHERS |= {"opacus_hooks": "opacus", "opacus_ghost": "opacus"}
LEAST_SECONDS = 20  # for a command to be begun with
ENDS = {0: "done", 3: "stopped", -9: "cut off"}


class Piece(NamedTuple):
    """A command of Python, and what it is called."""

    name: str
    command: list[str]


def pieces() -> Iterator[Piece]:
    """All of them, in order."""
    out, device = _OUT.value, _DEVICE.value
    together = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
    yield Piece("tests", ["-m", "pytest", "-q", *together, *(f"tests/test_{x}.py" for x in TESTS)])
    timed = ",".join(name for name, module in OTHERS.items() if find_spec(module))
    for name, flag, more in (
        ("step", f"{out}/step_{device}.json", ["--batch=512", "--precision=bfloat16"]),
        ("sizes", f"{out}/sizes_{device}", []),
        ("depth", f"{out}/depth_{device}", []),
        ("peers", f"{out}/peers_{device}.json", [f"--only={timed}", "--batch=512"]),
    ):
        yield Piece(name, ["-m", f"scripts.benchmarks.{name}", f"--out={flag}", *more])
    config = {
        "epsilon": 2, "seed": 0, "dataset.source": "parquet", "dataset.path": _DATA.value,
        "precision": "bfloat16", "checkpoint.every": 50,
    }  # fmt: skip
    for method in ("dp_sgd", "bam_sam") if _DATA.value else ():
        train = ["-m", "bam", "train", f"--config=configs/cifar10.py:{method}"]
        train += [f"--workdir={_WORKDIR.value}/{method}"]
        yield Piece(method, train + [f"--config.{key}={value}" for key, value in config.items()])


def run(piece: Piece, seconds: float) -> dict[str, object]:
    """Its end, its seconds and its last lines; all of them are in a log."""
    started, workdir = time.perf_counter(), Path(_WORKDIR.value)
    command = [sys.executable, *piece.command]
    if "train" in piece.command:  # it stops with a checkpoint, and a while before it is killed
        command.append(f"--max_seconds={max(1.0, seconds - LEAST_SECONDS)}")
    log = workdir / f"{piece.name}.log"
    with log.open("wb") as output:
        environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # tests share a GPU
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    took = round(time.perf_counter() - started, 1)
    return {"end": ENDS.get(code, f"failed ({code})"), "seconds": took, "last": lines[-3:]}


def main() -> None:
    """Runs what is not done, until the seconds are over; what failed is not run again."""
    workdir, started = Path(_WORKDIR.value), time.perf_counter()
    with console.one_line_errors():
        workdir.mkdir(parents=True, exist_ok=True)
        kept = workdir / "pieces.json"
        known = files.read_json(kept) if kept.exists() else {}
        for piece in pieces():
            if known.get(piece.name, {}).get("end", "cut off") not in ("stopped", "cut off"):
                continue
            left = _SECONDS.value - (time.perf_counter() - started)
            if left < LEAST_SECONDS:
                print(f"{piece.name} and what follows: the same command goes on there")
                break
            known[piece.name] = run(piece, left)
            print(f"{piece.name}: {known[piece.name]['end']}, {known[piece.name]['seconds']} s")
            files.write_json(kept, known)
        out = Path(_OUT.value)
        timing.keep(out / f"accelerator_{_DEVICE.value}.json", {"pieces": known})
        for method in ("dp_sgd", "bam_sam"):
            for name in ("summary.json", "metrics.jsonl"):
                if (file := workdir / method / name).exists():
                    shutil.copy(file, out / f"{method}_{_DEVICE.value}_{name}")


if __name__ == "__main__":
    console.run(main)
