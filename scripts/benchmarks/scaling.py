"""How much faster a run gets with more CPU cores: as devices of one process, and as processes.

python -m scripts.benchmarks.scaling --out=benchmarks/scaling_cpu.json \
  --train="--config=configs/digits.py:bam_sam --config.accountant=rdp" [--train=…]

Every run is `python -m scripts.train` with these arguments, on one core and on all of them. What is
compared is the time of a step, without compilation, in the second half of `--num_steps`.
"""

import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from bam import report
from scripts.lib import cli, tables

_TRAIN = flags.DEFINE_multi_string("train", None, "arguments of scripts.train, one flag for each")
_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 12, "steps of each run", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "every placement runs so often, in turn", lower_bound=1)
cli.require("train", "out")


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
                found = run(shlex.split(arguments), processes)
                seconds[name].append(found["seconds_per_step"])
                accuracies[name] = found["test_accuracy"]
        one = statistics.median(seconds["1 core"])
        print(arguments)
        for name, observed in seconds.items():
            median = statistics.median(observed)
            results.append(
                {
                    "train": arguments,
                    "place": name,
                    "seconds_per_step": median,
                    "observed": observed,
                    "speed_up": one / median,
                    "test_accuracy": accuracies[name],
                }
            )
            print(f"  {name:<28} {median:8.3f} s per step   {one / median:5.2f} ×", flush=True)
    out = Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": report.device_name(), "num_cores": len(cores)}
    report.write_json(out, facts | {"versions": report.versions(), "runs": results})
    report.write_text(out.with_suffix(".md"), table(results))


def table(results: list[dict[str, Any]]) -> str:
    """The results for a document: a run is named by its config, such as `mnist.py:dp_sgd`."""
    columns = ["run", "place", "s per step", "lowest", "highest", "speed-up", "accuracy"]
    rows = []
    for found in results:
        (config,) = re.findall(r"configs/(\S+)", found["train"])
        numbers = (found["seconds_per_step"], min(found["observed"]), max(found["observed"]))
        rows.append(
            [
                f"`{config}`",
                found["place"],
                *(f"{x:.3f}" for x in numbers),
                f"{found['speed_up']:.2f}",
                f"{found['test_accuracy']:.2%}",
            ]
        )
    return tables.markdown(columns, rows)


def placements(cores: list[int]) -> dict[str, list[tuple[list[int], int]]]:
    """Ways to place a run: for each of its processes, the cores and the number of JAX devices."""
    num = len(cores)
    found = {"1 core": [(cores[:1], 1)]}
    if num > 1:
        found[f"{num} cores, 1 device"] = [(cores, 1)]
        found[f"{num} cores, {num} devices"] = [(cores, num)]
        found[f"{num} processes of 1 core"] = [([core], 1) for core in cores]
    return found


def run(arguments: list[str], processes: list[tuple[list[int], int]]) -> dict[str, Any]:
    """One run on a placement: its seconds per step and its accuracy."""
    steps = _NUM_STEPS.value
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        command = [
            *(sys.executable, "-m", "scripts.train", *arguments, f"--workdir={folder}/run"),
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
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    middle, last = rows[-2], rows[-1]
    return {
        "seconds_per_step": (last["seconds"] - middle["seconds"]) / (last["step"] - middle["step"]),
        "test_accuracy": last["test_accuracy"],
    }


if __name__ == "__main__":
    cli.run(main)
