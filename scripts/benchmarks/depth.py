"""Step time and compile time against depth (Figure 3 of arXiv 2308.12018), on toy data.

python -m scripts.benchmarks.depth --out=benchmarks/depth_cpu
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import bam
from bam import models, part_table, waits
from bam.cli import command, screen
from bam.core import oracles
from bam.errors import InputError
from bam.sweep import plot
from bam.sweep.plot import plt
from bam.training import devices, diagnostics, methods
from scripts.benchmarks import timing
from scripts.benchmarks.performance import LABELS

_OUT = flags.DEFINE_string("out", "", "path without extension: .json and .png are written")
_DEPTHS = flags.DEFINE_list("depths", "2,5,10,20,50,100,200", "layers with weights")
_WIDTH = flags.DEFINE_integer("width", 64, "units per layer", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 32, "examples per step", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 10, "rounds through all methods", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "steps per round", lower_bound=1)

STRENGTH = 0.05


def reverse_over_reverse(loss_fn: oracles.LossFn, penalty: float) -> oracles.Oracle:
    """Exact BAM in its plainest form: the gradient of L + λ‖∇L‖, reverse over reverse."""
    objective = diagnostics.bias_aware_objective(loss_fn, penalty)
    return oracles.Oracle(lambda params, previous: params, jax.grad(objective))


METHODS = {name: row for name, row in part_table.METHODS.items() if methods.is_private(name)} | {
    "bam_reverse": part_table.Part(
        f"{__name__}:reverse_over_reverse", label=LABELS["bam_reverse"], strength="penalty"
    )
}
STYLES = plot.STYLES | {"bam_reverse": {"color": "#009E73", "linestyle": ":"}}


def main() -> None:
    """Times every method at every depth, then writes the numbers and the figure."""
    depths = [int(depth) for depth in _DEPTHS.value]
    if min(depths) < 2:
        raise InputError("--depths must be at least 2")
    rows = []
    for depth in depths:
        calls, compiling = {}, {}
        with waits.awaited(screen.show, f"compiling {len(METHODS)} methods of {depth} layers"):
            for method in METHODS:
                calls[method], compiling[method] = _step(method, depth)
        with waits.awaited(screen.show, f"timing them, {_TRIALS.value} rounds"):
            seconds = timing.measure(calls, _TRIALS.value, _REPEATS.value)
        for method in METHODS:
            row = timing.summarize(seconds[method], compiling[method])
            rows.append({"depth": depth, "method": method, **row._asdict()})
            screen.say(
                f"depth {depth:>4}  {METHODS[method].label:<26}  "
                f"step {1e3 * row.median:8.2f} ms  compilation {row.compile_seconds:6.2f} s"
            )
    out = Path(_OUT.value)
    settings = {name: flags.FLAGS[name].value for name in ("width", "batch", "trials", "repeats")}
    timing.keep(out.with_suffix(".json"), {**settings, "rows": rows})
    draw(rows, out.with_suffix(".png"))


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws step time and compile time against depth, one line per method."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.2, 4), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        chosen = [row for row in rows if row["method"] == method]
        depths = [row["depth"] for row in chosen]
        low, median, high = (
            1e3 * np.array([row[key] for row in chosen]) for key in ("low", "median", "high")
        )
        look = {**STYLES[method], "markersize": 3.5}
        bars = (median - low, high - median)
        plot.error_bars(left, depths, median.tolist(), bars, METHODS[method].label, look)
        compiling = [row["compile_seconds"] for row in chosen]
        right.plot(depths, compiling, linewidth=1.8, marker="o", **look)
    left.set_title("step, ms (median and quartiles)", fontsize=10)
    right.set_title("compilation, s", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("layers")
        axis.set_ylim(bottom=0)
    handles, labels = left.get_legend_handles_labels()
    plot.legend_below(figure, dict(zip(labels, handles, strict=True)))
    figure.suptitle(f"Time against depth, {devices.name()}", fontsize=11)
    plot.save(figure, path)


def _step(method: str, depth: int) -> tuple[Callable[[], Any], float]:
    """A compiled private step of a method at a depth, and the seconds of compiling it."""
    module = models.create("deep_residual", 10, _WIDTH.value, depth=depth)
    model = models.as_functions(module, (_WIDTH.value,))
    row = METHODS[method]
    oracle = row.make(model.loss, **({row.strength: STRENGTH} if row.strength else {}))
    clip = bam.clip_by_l2_norm(1.0)
    optimizer = optax.sgd(0.1)
    params = model.init(jax.random.key(1))
    batch = {
        "image": jax.random.normal(jax.random.key(2), (_BATCH.value, 1, _WIDTH.value)),
        "label": jnp.arange(_BATCH.value) % 10,
    }

    def step(params: Any, private_grad: Any, key: Any, batch: Any) -> Any:
        params_at = oracle.ascend(params, private_grad)
        noised, _ = bam.clipped_sum(
            oracle.grad,
            clip,
            params_at,
            batch,
            mask=None,
            microbatch_size=_BATCH.value,
            noise=bam.gaussian_noise(clip, 1.0, key),
        )
        private_grad = jax.tree.map(lambda x: x / _BATCH.value, noised)
        updates, _ = optimizer.update(private_grad, optimizer.init(params), params)
        return optax.apply_updates(params, updates), private_grad, key

    state = (params, optax.tree.zeros_like(params), bam.seeded_key(0), batch)
    compiled, seconds = timing.compile_timed(step, *state)
    return functools.partial(compiled, *state), seconds


if __name__ == "__main__":
    command.run_script(main, ["out"])
