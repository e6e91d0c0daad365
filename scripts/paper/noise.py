"""What noise that ends somewhere costs: a floor on δ, of float32 inversion and of ours.

python -m scripts.paper.noise --out=docs/noise.json

An output that is impossible without an example, but not with it, has no place in an (ε, δ)
guarantee but in δ, at every ε. For a clipped gradient in one coordinate that no other example
uses, it is a draw that ends within S of the noise's edge: q · T · Φ(-(edge - 1/σ)).
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from scipy import stats

import bam
from bam import files
from bam.cli import console, tables
from bam.core import fixed_point
from bam.data.sources.archives import ROWS
from bam.training import provenance
from configs import cifar10, digits, imagenet32

_OUT = flags.DEFINE_string("out", "", "JSON file to write; its table goes beside it")
console.require("out")

# Name, config, number of examples, parameters, ε.
RUNS = (
    ("ImageNet32", imagenet32, ROWS["imagenet32"][0], 3_005_112, 10.0),
    ("CIFAR-10", cifar10, ROWS["cifar10"][0], 2_447_946, 10.0),
    ("CIFAR-10", cifar10, ROWS["cifar10"][0], 2_447_946, 2.0),
    ("CIFAR-10", cifar10, ROWS["cifar10"][0], 2_447_946, 1.0),
    ("digits", digits, 1437, 6_138, 3.0),
)
# Of one entry of ours, against the rounded Gaussian: tests/test_grid.py bounds it.
TOTAL_VARIATION = 1e-24
Edges = dict[str, float]
COLUMNS: tables.Columns = {
    "run": lambda row: row["run"],
    "ε": lambda row: f"{row['epsilon']:g}",
    "δ claimed": lambda row: f"{row['delta']:.2g}",
    "σ": lambda row: f"{row['noise_multiplier']:.3f}",
    "floor, float32 inversion": lambda row: f"{row['floor_float32_inversion']:.1e}",
    "floor, here": lambda row: f"{row['floor_here']:.1e}",
    "added to δ, here": lambda row: f"{row['added_to_delta']:.1e}",
}


def main() -> None:
    """Computes the table and writes it."""
    with console.one_line_errors():
        edges = {"float32_inversion": float32_edge(), "here": our_edge()}
        rows = [floors(*run, edges) for run in RUNS]
        out = Path(_OUT.value)
        files.write_json(out, {"edges": edges, "runs": rows, "versions": provenance.versions()})
    tables.show(COLUMNS, rows, keep=out.with_suffix(".md"))


def float32_edge() -> float:
    """The largest draw of `jax.random.normal` in float32, whose largest uniform is 1 - 2^-23."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    largest = np.maximum(low, np.float32(1 - 2**-23) * (np.float32(1) - low) + low)
    return float(np.sqrt(np.float32(2)) * jax.lax.erf_inv(jnp.float32(largest)))


def our_edge() -> float:
    """The largest draw of `fixed_point.gaussian`, in standard deviations."""
    weights = fixed_point.weights(fixed_point.COARSE_STD)
    largest = max(i for i, weight in enumerate(weights) if weight) - len(weights) // 2
    return fixed_point.COARSE * largest / fixed_point.NOISE_STD


def floors(
    name: str, module: Any, num_examples: int, num_params: int, epsilon: float, edges: Edges
) -> dict[str, Any]:
    """One run of the table."""
    config: ConfigDict = module.get_config("dp_sgd")
    q = config.expected_batch_size / num_examples
    steps = config.num_steps or config.num_epochs * (num_examples // config.expected_batch_size)
    sigma = bam.noise_multiplier(
        target_epsilon=epsilon, delta=config.delta, sampling_prob=q, num_steps=steps
    )
    found = {
        f"floor_{key}": float(q * steps * stats.norm.sf(edge - 1 / sigma))
        for key, edge in edges.items()
    }
    added = (1 + math.exp(epsilon)) * num_params * steps * TOTAL_VARIATION
    facts = {"run": name, "epsilon": epsilon, "delta": config.delta, "noise_multiplier": sigma}
    facts |= {"sampling_prob": q, "num_steps": steps, "num_params": num_params}
    return facts | found | {"added_to_delta": added}


if __name__ == "__main__":
    console.run(main)
