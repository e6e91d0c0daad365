"""Plants each fault of `faults.py` in a copy of the tree, and sees whether a test finds it.

python -m tests.planted [NAME ...] [--all-tests] [--out=FILE]

NAME: of a fault, or "control", which plants none and must pass; without any, all. `--all-tests`
runs every test, not those that a fault names. The table is FILE, JSON, and the same in Markdown
beside it (tests/planted/table.json); rows that were not measured now stay.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.planted.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
OWN_TEST = "tests/test_planted.py"  # it finds every fault, by the text alone
TOGETHER = 2  # copies that are tested at once
CONTROL = Fault(
    "control", "Nothing.", "", "", "", tuple(sorted({test for x in FAULTS for test in x.tests}))
)
# By pytest's exit code; any other is an error of ours.
ENDS, ENDS_OF_CONTROL = {0: "survived", 1: "caught"}, {0: "passed", 1: "failed"}
HEAD = """\
# Planted faults

Made by `python -m tests.planted`. A fault that survives is one that no test of those named finds.

| fault | what it breaks | file | tests | outcome | found first by |
|---|---|---|---|---|---|
"""


def measured(fault: Fault, every_test: bool) -> dict[str, object]:
    """The row of a fault: its outcome, and the test that failed first."""
    tests = [] if every_test else list(fault.tests)
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        tree, scratch = Path(folder, "tree"), Path(folder, "tmp")
        scratch.mkdir()
        copy(tree)
        if fault.file:
            path = tree / fault.file
            path.write_text(fault.planted(path.read_text()))
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--ignore={OWN_TEST}", *tests]
        command = [sys.executable, "-m", "pytest", *options]
        environ = os.environ | {"PYTHONPATH": str(tree), "TMPDIR": str(scratch)}
        done = subprocess.run(
            command, cwd=tree, env=environ, capture_output=True, text=True, check=False
        )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
    ends = ENDS_OF_CONTROL if fault is CONTROL else ENDS
    outcome = ends.get(done.returncode, "error")
    if outcome == "error":
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
    row: dict[str, object] = {
        "name": fault.name, "breaks": fault.breaks, "file": fault.file,
        "tests": tests or ["all"], "outcome": outcome,
    }  # fmt: skip
    return row | {"found_by": failed.group(1) if failed else ""}


def copy(tree: Path) -> None:
    """Copies the files of this one that git knows, and new ones that it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def write(out: Path, rows: list[dict[str, object]]) -> None:
    """The table, in the order of the list, with the rows of an earlier one that are not new."""
    old = json.loads(out.read_text()) if out.exists() else []
    kept = {row["name"]: row for row in [*old, *rows]}
    table = [kept[x.name] for x in (CONTROL, *FAULTS) if x.name in kept]
    out.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    lines = []
    for row in table:
        tests = ", ".join(Path(test).stem.removeprefix("test_") for test in row["tests"])
        tests = "those of all faults" if row["name"] == "control" and tests != "all" else tests
        cells = row["name"], row["breaks"], row["file"], tests, row["outcome"], row["found_by"]
        lines.append("| " + " | ".join(str(x).replace("|", r"\|") for x in cells) + " |\n")
    out.with_suffix(".md").write_text(HEAD + "".join(lines))


def main() -> int:
    """Plants faults, tests them and reports the results.

    The exit status is 1 if a fault survived or could not be tried.
    """
    known = {fault.name: fault for fault in (CONTROL, *FAULTS)}
    parser = argparse.ArgumentParser(prog="python -m tests.planted")
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(known))
    parser.add_argument("--all-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("table.json"))
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no fault {', '.join(unknown)}")
    rows = []
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        chosen = [known[name] for name in given.names or known]
        begun = [pool.submit(measured, fault, given.all_tests) for fault in chosen]
        for done in concurrent.futures.as_completed(begun):
            row = done.result()
            print(f"{row['name']}: {row['outcome']} {row['found_by']}", flush=True)
            rows.append(row)
            write(given.out, rows)
    return 0 if all(row["outcome"] in ("passed", "caught") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
