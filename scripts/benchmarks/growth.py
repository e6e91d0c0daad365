"""How a step's time per example grows in batch, views and width.

python -m scripts.benchmarks.growth --out=benchmarks/growth_cpu.json
"""

from pathlib import Path

from absl import flags

from bam.cli import console, timing
from scripts.benchmarks import step

flags.adopt_module_key_flags(step)

# One of these changes at a time, from batch 32, one view, width 16.
AXES = {"batch": (8, 32, 128), "views": (1, 4, 16), "width": (8, 16, 32, 64)}
START = {"batch": 32, "views": 1, "width": 16}
METHODS = ("non_private", "dp_sgd", "bam_sam")


def main() -> None:
    """Compiles every step, times them in turn, writes milliseconds per example."""
    console.use_compilation_cache()
    calls, compiling, points = {}, {}, {}
    for axis, values in AXES.items():
        for value in values:
            at = START | {axis: value}
            for method in METHODS:
                name = f"{method} batch {at['batch']} views {at['views']} width {at['width']}"
                points[axis, value, method] = name, at["batch"]
                if name not in calls:
                    built = step.experiment_of(method, {}, at["views"], at["batch"], at["width"])
                    calls[name], compiling[name] = step.step_of(built, at["batch"])
    seconds = timing.measure(calls, flags.FLAGS.trials, flags.FLAGS.repeats)
    rows = []
    for (axis, value, method), (name, batch) in points.items():
        found = timing.summarize(seconds[name], compiling[name])
        low, median, high = (1e3 * s / batch for s in (found.low, found.median, found.high))
        print(f"{axis:<6} {value:>4}  {method:<12} {median:8.3f} ms per example", flush=True)
        row = {"axis": axis, "value": value, "method": method}
        rows.append(row | {"median_ms": median, "low_ms": low, "high_ms": high})
    facts = {"start": START, "trials": flags.FLAGS.trials, "rows": rows}
    timing.keep(Path(flags.FLAGS.out), facts)


if __name__ == "__main__":
    console.run(main)
