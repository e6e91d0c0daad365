"""How much faster a run gets with more CPU cores: as devices of one process, and as processes.

python -m scripts.benchmarks.scaling --out=benchmarks/scaling_cpu.json \
  --train="--config=configs/digits.py:bam_sam --config.accountant=rdp" [--train=…]

Every run is `bam train` with these arguments, on one core and on all of them. What is
compared is the time of a step, without compilation, in the second half of `--num_steps`.
"""

import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import flags

from bam.cli import console, sweeps, tables, timing

_TRAIN = flags.DEFINE_multi_string("train", None, "arguments of bam train, one flag for each")
_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 12, "steps of each run", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "every placement runs so often, in turn", lower_bound=1)
console.require("train", "out")


COLUMNS: tables.Columns = {
    "run": lambda row: "`" + re.findall(r"configs/(\S+)", row["train"])[0] + "`",
    "place": lambda row: row["place"],
    "s per step": lambda row: f"{row['seconds_per_step']:.3f}",
    "lowest": lambda row: f"{min(row['observed']):.3f}",
    "highest": lambda row: f"{max(row['observed']):.3f}",
    "speed-up": lambda row: f"{row['speed_up']:.2f}",
    "accuracy": lambda row: f"{row['test_accuracy']:.2%}",
}


def main() -> None:
    """Runs everything in turn, prints and writes medians."""
    if sys.platform != "linux":
        raise SystemExit("error: runs are tied to cores with Linux's taskset")
    cores = sorted(os.sched_getaffinity(0))
    places = placements(cores)
    results = []
    for arguments in _TRAIN.value or []:
        seconds: dict[str, list[float]] = {name: [] for name in places}
        accuracies = {}
        for _ in range(_ROUNDS.value):
            for name, processes in places.items():
                per_step, accuracies[name] = run(shlex.split(arguments), processes)
                seconds[name].append(per_step)
        alone = statistics.median(seconds["1 core"])
        for name, observed in seconds.items():
            median = statistics.median(observed)
            results.append(
                {
                    "train": arguments,
                    "place": name,
                    "seconds_per_step": median,
                    "observed": observed,
                    "speed_up": alone / median,
                    "test_accuracy": accuracies[name],
                }
            )
    out = Path(_OUT.value)
    timing.keep(out, {"num_cores": len(cores), "runs": results})
    tables.show(COLUMNS, results, keep=out.with_suffix(".md"))


def placements(cores: list[int]) -> dict[str, list[tuple[list[int], int]]]:
    """Ways to place a run: for each of its processes, the cores and the number of JAX devices."""
    num = len(cores)
    found = {"1 core": [(cores[:1], 1)]}
    if num > 1:
        found[f"{num} cores, 1 device"] = [(cores, 1)]
        found[f"{num} cores, {num} devices"] = [(cores, num)]
        found[f"{num} processes of 1 core"] = [([core], 1) for core in cores]
    return found


def run(arguments: list[str], processes: list[tuple[list[int], int]]) -> tuple[float, float]:
    """One run on a placement: its seconds per step and its accuracy."""
    steps = _NUM_STEPS.value
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        command = [
            *(sys.executable, "-m", "bam", "train", *arguments, f"--workdir={folder}/run"),
            *(f"--config.num_steps={steps}", f"--config.eval.every={steps // 2}"),
            *("--config.checkpoint.every=0", "--config.seed=0"),
        ]
        if len(processes) > 1:
            port = free.getsockname()[1]
            command += [f"--coordinator=localhost:{port}", f"--num_processes={len(processes)}"]
        free.close()
        running = []
        for i, (cores, num_devices) in enumerate(processes):
            own = [f"--process_id={i}"] if len(processes) > 1 else []
            pinned = ["taskset", "-c", ",".join(map(str, cores)), *command, *own]
            env = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices)}
            running.append(
                subprocess.Popen(pinned, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
        for process in running:
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(errors.decode())
        middle, last = sweeps.read(Path(folder) / "run").rows[-2:]
    per_step = (last["seconds"] - middle["seconds"]) / (last["step"] - middle["step"])
    return per_step, last["test_accuracy"]


if __name__ == "__main__":
    console.run(main)
