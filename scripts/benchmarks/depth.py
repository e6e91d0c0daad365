"""Step time and compile time against depth (Figure 3 of arXiv 2308.12018), on toy data.

python -m scripts.benchmarks.depth --out=benchmarks/depth_cpu

It writes OUT.json, OUT.md and OUT.png. jax-privacy and Opacus take a DP-SGD step of the same
network at three of the depths, if they are installed (make bench-peers installs them in
.venv-peers).
"""

import functools
import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import bam
from bam import files, models, part_table, tables, waits
from bam.cli import command, screen
from bam.core import oracles
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.sweep import plot
from bam.sweep.plot import plt
from bam.text import did_you_mean, plural
from bam.training import diagnostics, methods
from scripts.benchmarks import timing
from scripts.benchmarks.depth_others import OTHERS, Problem, Step

_OUT = flags.DEFINE_string("out", "", "path without extension: .json, .md and .png are written")
_DEPTHS = flags.DEFINE_list("depths", "2,5,10,20,50,100,200", "layers with weights")
_METHODS = flags.DEFINE_list("methods", [], "methods to time, by their names; none: all")
_WIDTH = flags.DEFINE_integer("width", 64, "units per layer", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 32, "examples per step", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 10, "rounds through all methods", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "steps per round", lower_bound=1)
_REDRAW = flags.DEFINE_bool("redraw", False, "only draw OUT.png again, from OUT.json")

REVERSE = (
    "Reverse-over-reverse is the plain way to the gradient of L + λ‖∇L‖: "
    "a backward pass through the backward pass. BAM (exact) takes one derivative forwards instead."
)
STRENGTH = 0.05


def reverse_over_reverse(loss_fn: oracles.LossFn, penalty: float) -> oracles.Oracle:
    """Exact BAM in its plainest form: the gradient of L + λ‖∇L‖, reverse over reverse."""
    objective = diagnostics.bias_aware_objective(loss_fn, penalty)
    return oracles.Oracle(lambda params, previous: params, jax.grad(objective))


METHODS = {name: row for name, row in part_table.METHODS.items() if methods.is_private(name)} | {
    "bam_reverse": part_table.Part(
        f"{__name__}:reverse_over_reverse", label="BAM (reverse-over-reverse)", strength="penalty"
    )
}
CHOICES = (*METHODS, *OTHERS)
NAMES = {name: row.label for name, row in METHODS.items()}
NAMES |= {name: other.label for name, other in OTHERS.items()}
STYLES = plot.STYLES | {
    "bam_reverse": {"color": "#009E73", "linestyle": ":"},
    "jax_privacy": {"color": "#56B4E9", "linestyle": "none", "marker": "s"},
    "opacus": {"color": "#D55E00", "linestyle": "none", "marker": "^"},
}


def main() -> None:
    """Times every method at every depth, then writes the numbers, the table and the figure."""
    out = Path(_OUT.value)
    if _REDRAW.value:
        redraw(out)
        return
    depths = sorted({int(depth) for depth in _DEPTHS.value})
    if depths[0] < 2:
        raise InputError("--depths must be at least 2")
    chosen = _METHODS.value or list(CHOICES)
    for name in chosen:
        if name not in CHOICES:
            hint = did_you_mean(name, CHOICES) or f": choose from {', '.join(CHOICES)}"
            raise InputError(f"--methods: no method {name!r}{hint}")
    files.check_writable(str(out.with_suffix(".json")))
    missing = {x for x in OTHERS if not _runs(x)}
    few = {depths[0], depths[len(depths) // 2], depths[-1]}  # depths of other libraries
    rows: list[JsonObject] = []
    for depth in depths:
        at_depth = [x for x in chosen if x in METHODS or (depth in few and x not in missing)]
        rows += _time_methods(at_depth, depth)
    names = ("width", "batch", "trials", "repeats")
    results = {name: flags.FLAGS[name].value for name in names} | {
        "rows": [row for row in rows if row["method"] in METHODS],
        "others": [row for row in rows if row["method"] in OTHERS],
    }
    timing.keep(out.with_suffix(".json"), results)
    columns, lines = table(chosen, depths, few, rows)
    files.write_text(out.with_suffix(".md"), tables.markdown(columns, lines))
    screen.table(columns, lines, "a step by number of layers, ms", file=out.with_suffix(".md"))
    if "bam_reverse" in chosen:
        screen.say(*textwrap.wrap(REVERSE, 79))
    redraw(out)


def redraw(out: Path) -> None:
    """Draws the figure from the numbers that are kept."""
    with waits.awaited(screen.show, "drawing"):
        draw(files.read_json(out.with_suffix(".json")), out.with_suffix(".png"))
    screen.say(f"picture: {out.with_suffix('.png')}")


def table(
    chosen: Sequence[str], depths: Sequence[int], few: set[int], rows: Sequence[JsonMapping]
) -> tuple[tables.Columns, list[list[str]]]:
    """Returns a table with the milliseconds of each method at each depth.

    A library that is not installed has "not run".
    """
    seconds = {(row["method"], row["depth"]): row["median"] for row in rows}

    def cell(name: str, depth: int) -> str:
        if (name, depth) not in seconds:
            return "not run" if depth in few else "–"
        milliseconds = 1e3 * seconds[name, depth]
        return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"

    lines = [[NAMES[name], *(cell(name, depth) for depth in depths)] for name in chosen]
    return tables.text("method", *map(str, depths)), lines


def draw(results: JsonMapping, path: Path) -> None:
    """Draws step time and compile time against depth, one line per method."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.2, 4.6), layout="constrained")
    rows = [*results["rows"], *results.get("others", ())]
    names = list(dict.fromkeys(row["method"] for row in rows))
    for name in names:
        chosen = [row for row in rows if row["method"] == name]
        depths = [row["depth"] for row in chosen]
        low, median, high = (
            1e3 * np.array([row[key] for row in chosen]) for key in ("low", "median", "high")
        )
        look = {"marker": "o", "markersize": 3.5, **STYLES[name]}
        bars = (median - low, high - median)
        plot.error_bars(left, depths, median.tolist(), bars, NAMES[name], look)
        compiling = [row["compile_seconds"] for row in chosen]
        if None not in compiling:
            right.plot(depths, compiling, linewidth=1.8, **look)
    left.set_title("step, ms (median and quartiles)", fontsize=10)
    right.set_title("compilation, s", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("layers")
        plot.log_axis(axis, {row["depth"] for row in rows})
    # Methods differ by factors, and a linear axis would press all but the slowest together.
    left.set_yscale("log")
    left.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_locator(plt.NullLocator())
    right.set_ylim(bottom=0)
    handles, labels = left.get_legend_handles_labels()
    plot.legend_below(figure, dict(zip(labels, handles, strict=True)))
    if "bam_reverse" in names:
        figure.legends[0].set_title(textwrap.fill(REVERSE, 86))
        figure.legends[0].get_title().set_fontsize(9)
    figure.suptitle(f"Time against depth, {results['device']}", fontsize=11)
    plot.save(figure, path)


def _runs(name: str) -> bool:
    """Whether another library is installed, and computes on the device of bam."""
    other = OTHERS[name]
    return bool(importlib.util.find_spec(other.package)) and (
        jax.default_backend() in other.platforms
    )


def _time_methods(names: Sequence[str], depth: int) -> list[JsonObject]:
    """The rows of methods at a depth."""
    calls, compiling = {}, {}
    task = f"compiling {plural(len(names), 'method')} of {depth} layers"
    with waits.awaited(screen.show, task) as wait:
        for number, name in enumerate(names, start=1):
            calls[name], compiling[name] = _step(name, depth)
            wait.share = number / len(names)
    seconds = timing.measure(calls, _TRIALS.value, _REPEATS.value)
    rows: list[JsonObject] = []
    for name in names:
        row = timing.summarize(seconds[name], compiling[name])
        rows.append({"depth": depth, "method": name, **row._asdict()})
        compiled = tables.number(row.compile_seconds, "6.2f").rjust(6)
        screen.say(
            f"depth {depth:>4}  {NAMES[name]:<26}  "
            f"step {1e3 * row.median:8.2f} ms  compilation {compiled} s"
        )
    return rows


def _step(method: str, depth: int) -> Step:
    """A compiled private step of a method at a depth, and the seconds of compiling it."""
    module = models.create("deep_residual", 10, _WIDTH.value, depth=depth)
    model = models.as_functions(module, (_WIDTH.value,))
    batch = {
        "image": jax.random.normal(jax.random.key(2), (_BATCH.value, 1, _WIDTH.value)),
        "label": jnp.arange(_BATCH.value) % 10,
    }
    problem = Problem(model.loss, model.init(jax.random.key(1)), batch)
    return OTHERS[method].step(problem) if method in OTHERS else _ours(method, problem)


def _ours(method: str, problem: Problem) -> Step:
    row, params, batch = METHODS[method], problem.params, problem.batch
    oracle = row.make(problem.loss, **({row.strength: STRENGTH} if row.strength else {}))
    clip = bam.clip_by_l2_norm(problem.clip_norm)
    optimizer = optax.sgd(problem.learning_rate)
    num_examples = len(batch["label"])

    def step(params: Any, private_grad: Any, key: Any, batch: Any) -> Any:
        params_at = oracle.ascend(params, private_grad)
        noised, _ = bam.clipped_sum(
            oracle.grad,
            clip,
            params_at,
            batch,
            mask=None,
            microbatch_size=num_examples,
            noise=bam.gaussian_noise(clip, problem.noise_multiplier, key),
        )
        private_grad = jax.tree.map(lambda x: x / num_examples, noised)
        updates, _ = optimizer.update(private_grad, optimizer.init(params), params)
        return optax.apply_updates(params, updates), private_grad, key

    state = (params, optax.tree.zeros_like(params), bam.seeded_key(0), batch)
    compiled, seconds = timing.compile_and_time(step, *state)
    return functools.partial(compiled, *state), seconds


if __name__ == "__main__":
    command.run_script(main, ["out"])
