"""Seconds to the first step, and to the first step of another setting, in bam and other libraries.

make bench-cold        (in the environment of the peers; see the Makefile)

Each case runs in a fresh process, without compiled programs on the disk, on the same networks. A
library that is not installed is left out and named. `--tree=NAME=FOLDER` also measures bam in
another checkout.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from bam import files, provenance, waits
from bam.cli import command, screen, signals
from bam.errors import InputError
from bam.files import JsonObject
from bam.text import plural
from scripts.benchmarks import cold_case, timing
from scripts.benchmarks.cold_case import CASES, NETWORKS

_OUT = flags.DEFINE_string("out", "", "JSON file to write")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "processes of each case, in turn", lower_bound=1)
_NETWORK = flags.DEFINE_list("network", list(NETWORKS), f"networks: {', '.join(NETWORKS)}")
_BATCH = flags.DEFINE_integer("batch", 32, "examples per step", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 0, "of the networks; 0: each its default", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "cases to measure, beside those in the file; none: all")
_TREE = flags.DEFINE_multi_string("tree", [], "NAME=FOLDER: also measure this checkout")

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("jax-privacy", "torch", "opacus")
LIMIT = 3600  # seconds that a process may take
# Variables that would reuse compiled programs of JAX, or keep Python from writing its own.
CACHES = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")


class Run(NamedTuple):
    """A case in a checkout: its key in the file, its name in `CASES`, the checkout's folder."""

    key: str
    name: str
    folder: Path

    @property
    def label(self) -> str:
        """Its name for readers."""
        return cold_case.case_of(self.key).label


def main() -> None:
    """Runs every case in every round, and writes all measurements after each round."""
    trees = {"": ROOT, **_trees(_TREE.value)}
    if unknown := [x for x in _NETWORK.value if x not in NETWORKS]:
        raise InputError(f"no network {unknown[0]!r}: choose from {', '.join(NETWORKS)}")
    names, missing = _find_cases(_ONLY.value)
    cases = [x for name in names for x in _runs(name, trees)]
    for package in missing:
        screen.say(f"{package} is not installed here, and not measured")
    task = f"importing everything once, {plural(len(cases), 'process')}, not counted"
    with waits.awaited(screen.show, task) as wait:
        for number, case in enumerate(cases, start=1):
            _run(case, _NETWORK.value[0], steps=False)
            wait.share = number / len(cases)
    path = Path(_OUT.value)
    is_part = bool(_ONLY.value) and path.exists()
    before: JsonObject = files.read_json(path)["observations"] if is_part else {}
    observations: dict[str, dict[str, list[JsonObject]]] = {
        network: before.get(network, {}) | {case.key: [] for case in cases}
        for network in _NETWORK.value
    }
    for number in range(1, _ROUNDS.value + 1):
        for network in _NETWORK.value:
            for case in cases:
                task = f"round {number}: {case.label}, {network}"
                with waits.awaited(screen.show, task, stays=False):
                    observation = _run(case, network, steps=True)
                first = observation["seconds_to_first_step"]
                screen.say(f"{task}: {first:.1f} s to the first step")
                observations[network][case.key].append(observation)
        timing.keep(path, _results(observations, trees, missing))


def _results(
    observations: Mapping[str, Mapping[str, Sequence[JsonObject]]],
    trees: Mapping[str, Path],
    missing: Sequence[str],
) -> JsonObject:
    return {
        "batch": _BATCH.value,
        "rounds": min(len(x) for cases in observations.values() for x in cases.values()),
        "width": {name: _WIDTH.value or NETWORKS[name].width for name in observations},
        "numbers": cold_case.Numbers()._asdict(),
        "change": cold_case.CHANGE,
        "versions": provenance.versions(*LIBRARIES),
        "commits": {name or "this": _commit(folder) for name, folder in trees.items()},
        "not_installed": list(missing),
        "summary": {
            network: {key: timing.summarize_cold(x) for key, x in cases.items()}
            for network, cases in observations.items()
        },
        "observations": observations,
    }


def _run(case: Run, network: str, steps: bool) -> JsonObject:
    """Runs a case in a process of its own, and returns the JSON that it prints."""
    environ = {k: v for k, v in os.environ.items() if k not in CACHES}
    environ |= {"PYTHONPATH": str(case.folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    package = CASES[case.name].package
    if package == "bam":  # bam's commands use a device per core
        environ.setdefault("JAX_NUM_CPU_DEVICES", str(min(8, os.cpu_count() or 1)))
    script = ROOT / "scripts" / "benchmarks" / "cold_case.py"
    arguments: dict[str, Any] = {"name": case.name, "network": network, "steps": steps}
    arguments |= {"width": _WIDTH.value, "batch": _BATCH.value, "started": time.time()}
    with signals.as_exceptions():  # for which `run` ends the process
        process = subprocess.run(
            [sys.executable, "-P", str(script), json.dumps(arguments)],
            cwd=case.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"{case.label}, {network}:\n{process.stderr[-4000:]}")
    observation: JsonObject = json.loads(process.stdout.splitlines()[-1])
    file = Path(observation.pop("file"))
    if package == "bam" and not file.is_relative_to(case.folder):
        raise RuntimeError(f"{case.label}: bam was imported from {file}, not from {case.folder}")
    return observation


def _find_cases(only: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the cases to measure, and the packages that are missing.

    InputError if a case in `only` is unknown or needs a missing package.
    """
    if unknown := [name for name in only if name not in CASES]:
        raise InputError(f"no case {unknown[0]!r}: choose from {', '.join(CASES)}")
    names, missing = [], []
    for name in [*only] or [*CASES]:
        package = CASES[name].package
        if importlib.util.find_spec(package):
            names.append(name)
        elif only:
            raise InputError(f"{name} needs {package}, which is not installed: make bench-cold")
        elif package not in missing:
            missing.append(package)
    return names, missing


def _runs(name: str, trees: Mapping[str, Path]) -> list[Run]:
    """The runs of a case: one, or one in every checkout if the case measures bam."""
    if CASES[name].package != "bam":
        return [Run(name, name, ROOT)]
    return [Run(f"{name}@{tree}" if tree else name, name, folder) for tree, folder in trees.items()]


def _trees(texts: Sequence[str]) -> dict[str, Path]:
    """Maps NAME to the folder of each NAME=FOLDER.

    InputError for a folder that is not a checkout.
    """
    trees = {}
    for text in texts:
        name, _, folder = text.partition("=")
        path = Path(folder).expanduser().resolve()
        if not (name.isidentifier() and folder and (path / "bam" / "__init__.py").exists()):
            raise InputError(f"--tree={text}: write NAME=FOLDER, the folder of a checkout of bam")
        trees[name] = path
    return trees


def _commit(folder: Path) -> str:
    """The commit of a checkout, by its own `provenance.git_commit`."""
    if folder == ROOT:
        return provenance.git_commit()
    command = [sys.executable, "-P", "-c", "from bam import provenance as p; print(p.git_commit())"]
    environ = os.environ | {"PYTHONPATH": str(folder)}
    process = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    return process.stdout.strip()


if __name__ == "__main__":
    command.run_script(main, ["out", "network"])
