"""What the authors' noise is worth with the batches that they drew, beside the ε that they state.

python -m scripts.paper.authors_epsilon --out=docs/results/authors_epsilon.json

Their code draws batches of a fixed size without replacement and accounts for Poisson sampling. The
ε of such batches, for replacing one example, lies between two bounds: dp-accounting's from above,
and from below the ε of two data sets that exist: one with a gradient of norm C in a direction of
its own, the other with the opposite one in its place, and gradients of 0 otherwise.
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from bam import files
from bam.privacy import accounting
from bam.privacy.accounting import rounded_down, rounded_up
from bam.privacy.mechanisms import epsilon_of_fixed_size
from scripts.lib import cli, tables

_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
cli.require("out")

# CIFAR-10 and CIFAR-100 with 5,000 images held out, 75 epochs.
NUM_EXAMPLES, BATCH_SIZE, NUM_STEPS, DELTA = 45_000, 4096, 750, 1e-5
STATED = (1.0, 2.0, 8.0, 10.0)
NUM_BINS, SPACING = 40_000, 1e-4  # of a step's outcome, and of its privacy loss
COLUMNS: tables.Columns = {
    "ε stated": lambda row: f"{row['stated']:g}",
    "σ": lambda row: rounded_down(row["noise_multiplier"], ".4g"),
    "Poisson, add or remove one": lambda row: rounded_up(row["poisson"], ".3g"),
    "fixed size, replace one: at least": lambda row: rounded_down(row["at_least"], ".3g"),
    "at most": lambda row: rounded_up(row["at_most"], ".3g"),
    "σ that would earn the ε stated": lambda row: rounded_up(row["noise_needed"], ".3g"),
}


def main() -> None:
    """Writes and prints the table."""
    with cli.one_line_errors():
        out = Path(_OUT.value)
        cli.check_writable(str(out))
        rows = [row(epsilon) for epsilon in STATED]
        settings = {"num_examples": NUM_EXAMPLES, "batch_size": BATCH_SIZE, "num_steps": NUM_STEPS}
        files.write_json(out, {"settings": settings | {"delta": DELTA}, "rows": rows})
    tables.show(COLUMNS, rows, keep=out.with_suffix(".md"))


def row(stated: float) -> dict[str, Any]:
    """The bounds for the noise of an ε that is stated for Poisson sampling, by RDP as they do."""
    prob = BATCH_SIZE / NUM_EXAMPLES
    steps: dict[str, Any] = {"num_steps": NUM_STEPS, "delta": DELTA}
    poisson = steps | {"sampling_prob": prob}
    fixed = steps | {"num_examples": NUM_EXAMPLES, "batch_size": BATCH_SIZE}
    sigma = accounting.noise_multiplier(target_epsilon=stated, accountant="rdp", **poisson)
    return {
        "stated": stated,
        "noise_multiplier": sigma,
        "poisson": accounting.epsilon(noise_multiplier=sigma, **poisson),
        "at_least": epsilon_of_a_pair(sigma, prob, NUM_STEPS, DELTA),
        "at_most": epsilon_of_fixed_size(noise_multiplier=sigma, **fixed),
        "noise_needed": accounting.least_noise(
            lambda s: epsilon_of_fixed_size(noise_multiplier=s, **fixed), stated, sigma, 1e-4
        ),
    }


def epsilon_of_a_pair(sigma: float, q: float, num_steps: int, delta: float) -> float:
    r"""ε of T steps of $(1-q) N(0, \sigma^2) + q N(\pm 1, \sigma^2)$, + or -, from below.

    What is seen of a step is the bin of its outcome, and privacy losses are rounded
    down.
    """
    edges = np.linspace(-12 * sigma, 12 * sigma, NUM_BINS + 1)
    edges[0], edges[-1] = -np.inf, np.inf

    def log_probabilities(mean: float) -> dict[int, float]:
        at = lambda m: _masses(edges, m, sigma)  # noqa: E731
        masses = (1 - q) * at(0.0) + q * at(mean)
        return dict(enumerate(np.log(np.maximum(masses, 1e-300))))

    step = privacy_loss_distribution.from_two_probability_mass_functions(
        log_probabilities(1.0),
        log_probabilities(-1.0),
        value_discretization_interval=SPACING,
        pessimistic_estimate=False,
    )
    return float(step.self_compose(num_steps).get_epsilon_for_delta(delta))


def _masses(edges: np.ndarray, mean: float, sigma: float) -> np.ndarray:
    """Probabilities of the bins of a normal variable, accurate in both tails."""
    below, above = (f(edges, mean, sigma) for f in (stats.norm.cdf, stats.norm.sf))
    masses: np.ndarray = np.where(edges[1:] <= mean, np.diff(below), -np.diff(above))
    return masses


if __name__ == "__main__":
    cli.run(main)
