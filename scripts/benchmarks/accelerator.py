"""Runs all measurements on an accelerator, piece by piece.

python -m scripts.benchmarks.accelerator --device=h100 --workdir=runs/accelerator --seconds=540 \
  --data=FOLDER

The pieces, in this order: tests of the device's arithmetic; times of kernels' gradients, of a step,
of its settings and of depths; other libraries, if they are installed; CIFAR-10 at the paper's scale
by DP-SGD and BAM at ε = 2, and by DP-SGD from weights of drawn images at ε = 8. A piece may take
the seconds that are left. If they end first, the next call starts the piece again, or resumes it if
it is a training. FOLDER has CIFAR-10 in Parquet.
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

from bam import files, waits
from bam.cli import command, screen, signals
from bam.features import prior
from scripts.benchmarks import timing

_DEVICE = flags.DEFINE_string("device", "", "the device, for names of results: for example h100")
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for runs, logs and finished pieces")
_OUT = flags.DEFINE_string("out", "benchmarks", "folder for results")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet; '': no training")
_SECONDS = flags.DEFINE_float("seconds", 540, "time for this call", lower_bound=1)

TESTS = (
    "chacha", "exact_sums", "engine", "grid", "oracles", "position", "properties",
    "sampling", "transforms", "devices", "audit", "strategy", "users", "private_training",
    "convolutions",
)  # fmt: skip
# Peer of scripts.benchmarks.peers -> the module that it needs.
OTHERS = dict.fromkeys(("ours_nonprivate", "ours_dp_sgd", "ours_bam_sam", "jax_vmap"), "bam")
OTHERS |= {"jax_privacy": "jax_privacy", "torch_nonprivate": "torch"}
OTHERS |= {"opacus_hooks": "opacus", "opacus_ghost": "opacus"}
# Piece that trains -> its config.
TRAININGS = {
    "dp_sgd": "configs/cifar10.py:dp_sgd",
    "bam_sam": "configs/cifar10.py:bam_sam",
    "network": "configs/cifar10_prior_network.py:dp_sgd",
}
LEAST_SECONDS = 20  # a piece starts only if this many are left
ENDS = {0: "done", 3: "stopped", -9: "cut off"}


class Piece(NamedTuple):
    """A name and the arguments of a Python command."""

    name: str
    command: list[str]


def pieces() -> Iterator[Piece]:
    """All pieces, in order."""
    out, device = _OUT.value, _DEVICE.value
    together = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
    tests = [*together, "-m", "not slow", *(f"tests/test_{x}.py" for x in TESTS)]
    yield Piece("tests", ["-m", "pytest", "-q", *tests])
    timed = ",".join(name for name, module in OTHERS.items() if find_spec(module))
    for name, flag, more in (
        ("convolutions", f"{out}/convolutions_{device}", ["--seconds=300"]),
        ("step", f"{out}/step_{device}.json", ["--batch=512", "--precision=bfloat16"]),
        ("sizes", f"{out}/sizes_{device}", []),
        ("depth", f"{out}/depth_{device}", []),
        ("peers", f"{out}/peers_{device}.json", [f"--only={timed}", "--batch=512"]),
    ):
        yield Piece(name, ["-m", f"scripts.benchmarks.{name}", f"--out={flag}", *more])
    values = {
        "seed": 0, "dataset.source": "parquet", "dataset.path": _DATA.value,
        "precision": "bfloat16", "checkpoint.every": 50,
    }  # fmt: skip
    for name, config in TRAININGS.items() if _DATA.value else ():
        train = ["-m", "bam", "train", f"--config={config}", f"--workdir={_WORKDIR.value}/{name}"]
        begin = {"init_from": _weights()} if name == "network" else {}
        given = (values | begin).items()
        yield Piece(name, train + [f"--config.{key}={value}" for key, value in given])


def _weights() -> str:
    """Returns the path of the weights of drawn images."""
    return f"{_WORKDIR.value}/network.safetensors"


def run(piece: Piece, seconds: float) -> dict[str, object]:
    """Runs a piece, and returns its end, its seconds and its last lines.

    A log has all lines.
    """
    started, workdir = time.perf_counter(), Path(_WORKDIR.value)
    command = [sys.executable, *piece.command]
    if "train" in piece.command:  # so that it saves a checkpoint before it is killed
        command.append(f"--max_seconds={max(1.0, seconds - LEAST_SECONDS)}")
    log = workdir / f"{piece.name}.log"
    task = f"running {piece.name}, for {waits.in_words(seconds)} at most"
    with waits.awaited(screen.show, task), signals.as_exceptions(), log.open("wb") as output:
        # Tests in several processes share a GPU, and run what its compiler makes for users.
        environ = {"XLA_FLAGS": ""} | os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        finally:
            _end(process)  # which still runs if a signal ends this script
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    took = round(time.perf_counter() - started, 1)
    return {"end": ENDS.get(code, f"failed ({code})"), "seconds": took, "last": lines[-3:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process.

    A training saves a checkpoint first.
    """
    process.terminate()
    try:
        process.wait(LEAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Runs the unfinished pieces until the seconds are over.

    A failed piece is not run again.
    """
    workdir, started = Path(_WORKDIR.value), time.perf_counter()
    workdir.mkdir(parents=True, exist_ok=True)
    record = workdir / "pieces.json"
    ends = files.read_json(record) if record.exists() else {}
    if _DATA.value:
        prior.save_network(_weights())
    for piece in pieces():
        if ends.get(piece.name, {}).get("end", "cut off") not in ("stopped", "cut off"):
            continue
        remaining = _SECONDS.value - (time.perf_counter() - started)
        if remaining < LEAST_SECONDS:
            screen.say(f"not run: {piece.name} and later pieces; the same command continues")
            break
        ends[piece.name] = run(piece, remaining)
        screen.say(f"{piece.name}: {ends[piece.name]['end']}, {ends[piece.name]['seconds']} s")
        files.write_json(record, ends)
    out = Path(_OUT.value)
    timing.keep(out / f"accelerator_{_DEVICE.value}.json", {"pieces": ends})
    for method in TRAININGS:
        for name in ("summary.json", "metrics.jsonl"):
            if (file := workdir / method / name).exists():
                shutil.copy(file, out / f"{method}_{_DEVICE.value}_{name}")


if __name__ == "__main__":
    command.run_script(main, ["device", "workdir"])
