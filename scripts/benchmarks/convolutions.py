"""Time of the gradients of ResNet-9's kernels, one for each example, by the form of convolutions.

python -m scripts.benchmarks.convolutions --out=benchmarks/convolutions_h100 --seconds=300

It writes OUT.json and OUT.md: for each shape of a layer, the three forms beside "ordinary", the one
gradient that ordinary training computes of the same images. Shapes for which no time was left are
missing. On other devices than GPUs, "grouped" is the same as "xla".
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jaxtyping import Array

from bam import files, models, provenance, tables, waits
from bam.cli import command, jax_setup, screen
from bam.errors import InputError
from bam.files import JsonObject
from bam.models.layers import conv2d, convolutions_as
from scripts.benchmarks import timing

LEAST_SECONDS = 20  # a shape starts only if this many are left
WINDOW = 3
FORMS = ("xla", "grouped", "matmul")
ORDINARY = "ordinary"
COLUMNS: tables.Columns = {
    "views": lambda row: str(row["views"]),
    "microbatch": lambda row: str(row["microbatch"]),
    "layer": lambda row: row["layer"],
    "form": lambda row: row["form"],
    "µs per example": lambda row: f"{row['us']:.3g}",
    "TFLOP/s": lambda row: f"{row['tflops']:.3g}",
    "× ordinary": lambda row: f"{row['ratio']:.2f}",
}


class Layer(NamedTuple):
    """The shape of a convolution, and how many of a ResNet-9's convolutions have it."""

    channels: int
    features: int
    side: int
    number: int

    def __str__(self) -> str:
        """As `64→128 at 32×32`."""
        return f"{self.channels}→{self.features} at {self.side}×{self.side}"

    def flop(self, num_images: int) -> int:
        """Multiplications and additions of the gradients of this many images."""
        return 2 * num_images * self.side**2 * WINDOW**2 * self.channels * self.features


def main() -> None:
    """Compiles and times one shape after another until the seconds are over."""
    jax_setup.use_compilation_cache()
    ends, rows = time.monotonic() + _SECONDS.value, []
    for views, microbatch in _sizes():
        for layer in layers(_WIDTH.value, _SIDE.value):
            if time.monotonic() > ends - LEAST_SECONDS:
                break
            rows += (new := list(_time_layer(layer, views, microbatch)))
            screen.say(*("  ".join(show(row) for show in COLUMNS.values()) for row in new))
    out, totals = Path(_OUT.value), list(sums(rows))
    names = ("precision", "width", "side", "trials", "calls")
    results = {name: flags.FLAGS[name].value for name in names}
    results |= {"commit": provenance.git_commit(), "rows": rows, "all_layers": totals}
    timing.keep(out.with_suffix(".json"), results)
    files.write_text(out.with_suffix(".md"), table([*rows, *totals]))


def layers(width: int, side: int) -> list[Layer]:
    """The six shapes of ResNet-9's eight convolutions."""
    w, s = width, side
    return [
        Layer(3, w, s, 1), Layer(w, 2 * w, s, 1), Layer(2 * w, 2 * w, s // 2, 2),
        Layer(2 * w, 4 * w, s // 2, 1), Layer(4 * w, 4 * w, s // 4, 1),
        Layer(4 * w, 4 * w, s // 8, 2),
    ]  # fmt: skip


def gradients_of_examples(form: str) -> Callable[[Array, Array], Array]:
    """The function from images and gradients of outputs to each example's kernel gradient."""

    def gradient(images: Array, cotangents: Array) -> Array:
        shape = (WINDOW, WINDOW, images.shape[-1], cotangents.shape[-1])
        with convolutions_as(form):
            transpose = jax.linear_transpose(
                lambda kernel: conv2d(images, kernel), jax.ShapeDtypeStruct(shape, images.dtype)
            )
        return transpose(cotangents)[0]

    return jax.vmap(gradient)


def ordinary_gradient(images: Array, cotangents: Array) -> Array:
    """The sum of all examples' gradients: all images are those of one example."""
    together = (x.reshape(1, -1, *x.shape[2:]) for x in (images, cotangents))
    return gradients_of_examples("xla")(*together)[0]


def sums(rows: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """The rows of all layers together, where each was timed."""
    for views, form in dict.fromkeys((row["views"], row["form"]) for row in rows):
        layers_of_form = [row for row in rows if (row["views"], row["form"]) == (views, form)]
        if len(layers_of_form) < len(layers(1, 16)):
            continue
        us = sum(row["count"] * row["us"] for row in layers_of_form)
        mflop = sum(row["count"] * row["us"] * row["tflops"] for row in layers_of_form)
        ordinary = sum(row["count"] * row["us"] / row["ratio"] for row in layers_of_form)
        yield {
            "views": views, "microbatch": layers_of_form[0]["microbatch"], "layer": "all eight",
            "form": form, "us": us, "tflops": mflop / us, "ratio": us / ordinary,
        }  # fmt: skip


def table(rows: Sequence[JsonObject]) -> str:
    """The rows in Markdown."""
    cells = [[show(row) for show in COLUMNS.values()] for row in rows]
    return tables.markdown(tables.text(*COLUMNS), cells, ("layer", "form"))


def _sizes() -> list[tuple[int, int]]:
    """The views of an example with the examples at once, from the flags.

    InputError if they are not as many, or no positive numbers.
    """
    views, microbatches = _VIEWS.value, _MICROBATCHES.value
    numbers = all(x.isdecimal() and int(x) for x in views + microbatches)
    if len(views) != len(microbatches) or not numbers:
        raise InputError("--views and --microbatches need equally many numbers from 1")
    return [(int(v), int(m)) for v, m in zip(views, microbatches, strict=True)]


def _time_layer(layer: Layer, views: int, microbatch: int) -> Iterator[dict[str, Any]]:
    """A layer's row of each form: microseconds per example, and the arithmetic rate."""
    dtype = jnp.bfloat16 if _PRECISION.value == "bfloat16" else jnp.float32
    arguments = [
        jax.random.normal(jax.random.key(n), (microbatch, views, layer.side, layer.side, n), dtype)
        for n in (layer.channels, layer.features)
    ]
    fns = {ORDINARY: ordinary_gradient} | {x: gradients_of_examples(x) for x in FORMS}
    products = "tensorfloat32" if _PRECISION.value == "tensorfloat32" else "float32"
    with (
        jax.default_matmul_precision(products),
        waits.compiling(screen.show, f"{layer}, {views} views"),
    ):
        programs = {name: timing.compile_and_time(fn, *arguments)[0] for name, fn in fns.items()}

    def call(program: Callable[..., Array]) -> Array:
        # The device starts on the next call at once, as in a step.
        return [program(*arguments) for _ in range(_CALLS.value)][-1]

    calls = {name: functools.partial(call, program) for name, program in programs.items()}
    seconds = timing.measure(calls, _TRIALS.value, repeats=1)
    per_example = 1e6 / (_CALLS.value * microbatch)
    us = {name: timing.summarize([x * per_example for x in seconds[name]], None) for name in fns}
    for name, row in us.items():
        yield {
            "views": views, "microbatch": microbatch, "layer": str(layer), "count": layer.number,
            "form": name, "us": row.median, "low": row.low, "high": row.high,
            "tflops": layer.flop(views) / row.median / 1e6,
            "ratio": row.median / us[ORDINARY].median,
        }  # fmt: skip


if __name__ == "__main__":  # here, because tests import this module beside others with flags
    _OUT = flags.DEFINE_string("out", "", "path without extension: .json and .md are written")
    _SECONDS = flags.DEFINE_float("seconds", 540, "time for all shapes", lower_bound=1)
    _VIEWS = flags.DEFINE_list("views", "16,1", "views of an example")
    _MICROBATCHES = flags.DEFINE_list(
        "microbatches", "64,512", "examples at once, for each of --views"
    )
    _PRECISION = flags.DEFINE_enum(
        "precision", "bfloat16", models.PRECISIONS, "network's arithmetic"
    )
    _WIDTH = flags.DEFINE_integer("width", 64, "width of ResNet-9", lower_bound=1)
    _SIDE = flags.DEFINE_integer("side", 32, "side of images in pixels; a multiple of 16", 16)
    _TRIALS = flags.DEFINE_integer("trials", 7, "rounds through all forms", lower_bound=1)
    _CALLS = flags.DEFINE_integer("calls", 10, "calls of a round, of which a device has no rest", 1)
    command.run_script(main, ["out"])
