"""A paper estimate of a step on many accelerators: its arithmetic, not a measurement.

python -m scripts.benchmarks.estimate [--config=configs/imagenet32.py:bam_sam] [--rate_tflops=20] …

Compute: multiplications and additions of every example's gradient, over the assumed rate.
Communication: one all-reduce of the sum, float32, by a ring over the assumed bandwidth and latency.
"""

import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict, config_flags

from bam import models, report, tree
from bam.data.datasets import DATASETS
from bam.parts import make_oracle
from scripts.lib import cli, tables, timing

_CONFIG = config_flags.DEFINE_config_file("config", "configs/imagenet32.py:bam_sam")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 1_281_167, "N of the training split")
_DEVICES = flags.DEFINE_multi_integer("devices", [1, 8, 64, 256, 1024, 4096], "how many")
_RATE = flags.DEFINE_float("rate_tflops", 20.0, "assumed of one device, 10¹² operations a second")
_BANDWIDTH = flags.DEFINE_float("bandwidth_gb", 50.0, "assumed of each device, 10⁹ bytes a second")
_LATENCY = flags.DEFINE_float("latency_us", 10.0, "assumed of a message, microseconds")
_MARKDOWN = flags.DEFINE_string("markdown", "", "file for the table; '': none")


class Step(NamedTuple):
    """What one step costs, whatever the number of devices."""

    num_params: int  # P
    flops: int  # of one example's gradient, its views included
    batch_size: int  # l


class Estimate(NamedTuple):
    """One step on D devices; `efficiency` is the speed-up over one device, divided by D."""

    compute_seconds: float  # the fullest device's share of the examples
    communication_seconds: float  # of the all-reduce
    megabytes: float  # sent by each device
    efficiency: float


def cost(config: ConfigDict) -> Step:
    """Counts parameters and operations of a config's step, by tracing one example's gradient."""
    facts = DATASETS[config.dataset.name]
    module = models.create(num_classes=facts.num_classes, **config.model)
    model = models.as_functions(module, facts.shape, convolution="xla")
    params = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((config.augment.views, *facts.shape), jnp.float32)
    example = {"image": image, "label": jax.ShapeDtypeStruct((), jnp.int32)}
    oracle = make_oracle(config.method, model.loss)
    flops = timing.matrix_flops(oracle.grad, params, example)
    return Step(tree.num_params(params), flops, config.expected_batch_size)


def estimate(
    step: Step, num_devices: int, rate: float, bandwidth: float, latency: float
) -> Estimate:
    """The arithmetic, in operations, bytes and seconds.

    ⌈l/D⌉ · flops / rate; a ring's 2 (D - 1)/D · 4 P bytes over the bandwidth, and 2 log₂ D
    latencies (of a tree, as such libraries use for many devices).
    """
    share = math.ceil(step.batch_size / num_devices)
    compute = share * step.flops / rate
    bytes_sent = 2 * (num_devices - 1) / num_devices * 4 * step.num_params
    communication = bytes_sent / bandwidth + 2 * math.log2(num_devices) * latency
    alone = step.batch_size * step.flops / rate
    efficiency = alone / num_devices / (compute + communication)
    return Estimate(compute, communication, bytes_sent / 1e6, efficiency)


def main() -> None:
    """Prints the table."""
    with cli.one_line_errors():
        config = _CONFIG.value
        step = cost(config)
        steps = config.num_steps or config.num_epochs * (_NUM_EXAMPLES.value // step.batch_size)
        columns = ["devices", "compute, ms", "all-reduce, ms", "sent by each, MB", "efficiency"]
        columns.append(f"{steps:,} steps, minutes")
        rows = []
        for num in _DEVICES.value:
            found = estimate(
                step, num, 1e12 * _RATE.value, 1e9 * _BANDWIDTH.value, 1e-6 * _LATENCY.value
            )
            seconds = found.compute_seconds + found.communication_seconds
            rows.append(
                [
                    f"{num:,}",
                    f"{1e3 * found.compute_seconds:,.2f}",
                    f"{1e3 * found.communication_seconds:.2f}",
                    f"{found.megabytes:.1f}",
                    f"{found.efficiency:.0%}",
                    f"{steps * seconds / 60:,.1f}",
                ]
            )
        title = (
            f"{config.method.name} on {config.dataset.name}, {config.model.name}: "
            f"{step.num_params:,} parameters, {step.flops / 1e9:.2f} GFLOP per example of "
            f"{config.augment.views} views, l = {step.batch_size}"
        )
        tables.show(columns, rows, f"{title}. ESTIMATE, nothing was run")
        if _MARKDOWN.value:
            report.write_text(
                Path(_MARKDOWN.value), f"{title}:\n\n{tables.markdown(columns, rows)}"
            )


if __name__ == "__main__":
    cli.run(main)
