"""Time per drawn example of a training step, every method, on a CIFAR-shaped problem.

python -m scripts.benchmarks.step --out=benchmarks/step_cpu.json
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bam import models, waits
from bam.cli import command, jax_setup, screen
from bam.files import JsonMapping
from bam.models import layers
from bam.training import trainer, tuning
from scripts.benchmarks import arithmetic, performance, timing

_OUT = flags.DEFINE_string("out", "", "JSON file to write")
_BATCH = flags.DEFINE_integer("batch", 32, "expected examples per step; a quarter with views", 1)
_MICROBATCH = flags.DEFINE_integer("microbatch", 0, "examples per group; 0: the fastest", 0)
_PRECISION = flags.DEFINE_enum("precision", "float32", models.PRECISIONS, "network's arithmetic")
_WIDTH = flags.DEFINE_integer("width", 64, "width of ResNet-9", lower_bound=1)
_VIEWS = flags.DEFINE_integer("views", 16, "K of the one-view comparison; 1 leaves it out", 1)
_TRIALS = flags.DEFINE_integer("trials", 7, "rounds through all methods", lower_bound=1)
_MEMORY_BATCHES = flags.DEFINE_list("memory_batches", "256,4096", "batch sizes for peak memory")
_ONLY = flags.DEFINE_list("only", [], "steps to time beside dp_sgd_ms; none: all")

MATMUL_SIZE = 2048
# Key in the JSON file -> method and its options.
METHODS: dict[str, tuple[str, JsonMapping]] = {
    "nonprivate_ms": ("non_private", {}),
    **{f"{method}_ms": (method, {}) for method in ("dp_sgd", "dp_sat", "bam_sam", "bam_exact")},
}
VIEW_METHODS: dict[str, tuple[str, JsonMapping]] = {
    "dp_sgd_views_ms": ("dp_sgd", {}),
    "bam_sam_views_ms": ("bam_sam", {}),
    "bam_sam_one_view_ms": ("bam_sam", {"method.ascent_views": 1}),
}


def main() -> None:
    """Compiles every step, times them in turn, writes milliseconds per drawn example."""
    jax_setup.use_compilation_cache()
    steps = METHODS | (VIEW_METHODS if _VIEWS.value > 1 else {})
    if _ONLY.value:
        steps = {k: v for k, v in steps.items() if k in ("dp_sgd_ms", *_ONLY.value)}
    compiled, sizes = {}, {}
    for name, (method, options) in steps.items():
        one_view = name in METHODS
        batch = _BATCH.value if one_view else max(1, _BATCH.value // 4)
        views = performance.ONE_VIEW if one_view else {"augment.views": _VIEWS.value}
        with waits.compiling(screen.show, name.removesuffix("_ms")):
            built = experiment_of(method, {**options, **views}, batch)
            compiled[name] = timing.steps_of(built)
        sizes[name] = built.config.microbatch_size
    calls = {name: x.take for name, x in compiled.items()} | {"matmul": _matmul()}
    seconds = timing.measure(calls, _TRIALS.value, repeats=1)
    observed = {name: [*map(x.ms_per_example, seconds[name])] for name, x in compiled.items()}
    compiling = {name: x.compile_seconds for name, x in compiled.items()}
    timings = {name: timing.summarize(ms, compiling[name]) for name, ms in observed.items()}
    for name, row in timings.items():
        screen.say(f"{name:<22} {row.median:8.3f} ms per drawn example")
    model = models.as_functions(models.create(num_classes=10, **built.config.model), (32, 32, 3))
    example = {"image": jnp.zeros((1, 32, 32, 3)), "label": jnp.zeros((), jnp.int32)}
    params = jax.eval_shape(model.init, jax.random.key(0))
    flops = arithmetic.matrix_flops(jax.grad(model.loss), params, example)
    matmul = [2 * MATMUL_SIZE**3 / s / 1e9 for s in seconds["matmul"]]
    settings = ("batch", "precision", "width", "views", "trials")
    results = {
        **{name: flags.FLAGS[name].value for name in settings},
        "microbatch": sizes,
        "capacity": {name: x.capacity for name, x in compiled.items()},
        "drawn": {name: x.drawn for name, x in compiled.items()},
        "convolution": layers.formulation(built.config.convolution),
        **{name: row.median for name, row in timings.items()},
        "matmul_gflops": float(np.median(matmul)),
        "dp_sgd_gflops": flops / timings["dp_sgd_ms"].median / 1e6,
        "flops_per_example": flops,
        "quartiles_ms": {name: [row.low, row.high] for name, row in timings.items()},
        "observations_ms": observed,
        "matmul_observations_gflops": matmul,
        "compile_seconds": compiling,
        "peak_memory_mb": {b: _memory(int(b)) for b in _MEMORY_BATCHES.value},
    }
    timing.keep(Path(_OUT.value), results)


def experiment_of(method: str, changes: JsonMapping, batch: int) -> trainer.Trainer:
    """ResNet-9 on random images of CIFAR-10's shape."""
    common = {"model.width": _WIDTH.value, "precision": _PRECISION.value}
    experiment = functools.partial(performance.experiment, method, batch)
    size = _MICROBATCH.value
    built = experiment(common | {"microbatch_size": size or 1} | dict(changes))
    if size:
        return built
    return experiment(common | {"microbatch_size": tuning.fastest_size(built)} | dict(changes))


def _memory(batch: int) -> float:
    """Megabytes that a DP-SGD step holds at once beside its arguments, as XLA plans it."""
    with waits.compiling(screen.show, f"dp_sgd for batches of {batch}"):
        built = experiment_of("dp_sgd", performance.ONE_VIEW, batch)
        plan = timing.steps_of(built).program.memory_analysis()
    return (plan.temp_size_in_bytes + plan.output_size_in_bytes) / 1e6


def _matmul() -> Callable[[], Any]:
    """A large float32 matrix product: the rate that the machine can reach."""
    square = jax.random.normal(jax.random.key(0), (MATMUL_SIZE, MATMUL_SIZE))
    return functools.partial(jax.jit(jnp.matmul).lower(square, square).compile(), square, square)


if __name__ == "__main__":
    command.run_script(main, ["out"])
