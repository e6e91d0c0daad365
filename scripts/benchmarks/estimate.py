"""A paper estimate of a step on many accelerators: its arithmetic, not a measurement.

python -m scripts.benchmarks.estimate [--config=configs/imagenet32.py:bam_sam] [--rate_tflops=20] …

Compute: multiplications and additions of every example's gradient, over the assumed rate, for the
⌈l/D⌉ examples of the fullest of D devices. Communication: one all-reduce of the sum, of two 32-bit
words per parameter, by a ring: 2 (D - 1)/D · 8 P bytes over the assumed bandwidth, and 2 log₂ D
latencies (of a tree, as such libraries use for many devices).
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict, config_flags

from bam import files, models, tree
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


def main() -> None:
    """Prints the table."""
    with cli.one_line_errors():
        config = _CONFIG.value
        num_params, flops = cost(config)
        batch_size = config.expected_batch_size
        steps = config.num_steps or config.num_epochs * (_NUM_EXAMPLES.value // batch_size)
        alone = batch_size * flops / (1e12 * _RATE.value)
        rows = []
        for num in _DEVICES.value:
            compute = alone * math.ceil(batch_size / num) / batch_size
            bytes_sent = 2 * (num - 1) / num * 8 * num_params
            latency = 2 * math.log2(num) * 1e-6 * _LATENCY.value
            communication = bytes_sent / (1e9 * _BANDWIDTH.value) + latency
            seconds = compute + communication
            rows.append(
                [
                    f"{num:,}",
                    f"{1e3 * compute:,.2f}",
                    f"{1e3 * communication:.2f}",
                    f"{bytes_sent / 1e6:.1f}",
                    f"{alone / num / seconds:.0%}",
                    f"{steps * seconds / 60:,.1f}",
                ]
            )
        columns = tables.text(
            "devices", "compute, ms", "all-reduce, ms", "sent by each, MB", "efficiency",
            f"{steps:,} steps, minutes",
        )  # fmt: skip
        title = (
            f"{config.method.name} on {config.dataset.name}, {config.model.name}: "
            f"{num_params:,} parameters, {flops / 1e9:.2f} GFLOP per example of "
            f"{config.augment.views} views, l = {batch_size}"
        )
        tables.show(columns, rows, f"{title}. ESTIMATE, nothing was run")
        if _MARKDOWN.value:
            table = f"{title}:\n\n{tables.markdown(columns, rows)}"
            files.write_text(Path(_MARKDOWN.value), table)


def cost(config: ConfigDict) -> tuple[int, int]:
    """Parameters, and operations of one example's gradient, which is traced."""
    facts = DATASETS[config.dataset.name]
    module = models.create(num_classes=facts.num_classes, **config.model)
    model = models.as_functions(module, facts.shape, convolution="xla")
    params = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((config.augment.views, *facts.shape), jnp.float32)
    example = {"image": image, "label": jax.ShapeDtypeStruct((), jnp.int32)}
    oracle = make_oracle(config.method, model.loss)
    return tree.num_params(params), timing.matrix_flops(oracle.grad, params, example)


if __name__ == "__main__":
    cli.run(main)
