"""What the authors' noise is worth with the batches that they drew, beside the ε that they state.

python -m scripts.paper.authors_epsilon --out=docs/results/authors_epsilon.json

Their code draws batches of a fixed size without replacement and accounts for Poisson sampling. The
ε of such batches, for replacing one example, lies between two bounds: dp-accounting's from above,
and from below the ε of two data sets that exist: one with a gradient of norm C in a direction of
its own, the other with the opposite one in its place, and gradients of 0 otherwise.
"""

from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import console, tables
from bam.privacy import accounting
from bam.privacy.accounting import rounded_down, rounded_up
from bam.privacy.fixed_size import epsilon_of_fixed_size, least_epsilon_of_fixed_size

_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
console.require("out")

# CIFAR-10 and CIFAR-100 with 5,000 images held out, 75 epochs.
NUM_EXAMPLES, BATCH_SIZE, NUM_STEPS, DELTA = 45_000, 4096, 750, 1e-5
STATED = (1.0, 2.0, 8.0, 10.0)
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
    with console.one_line_errors():
        out = Path(_OUT.value)
        console.check_writable(str(out))
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
        "at_least": least_epsilon_of_fixed_size(noise_multiplier=sigma, **fixed),
        "at_most": epsilon_of_fixed_size(noise_multiplier=sigma, **fixed),
        "noise_needed": accounting.least_noise(
            lambda s: epsilon_of_fixed_size(noise_multiplier=s, **fixed), stated, sigma, 1e-4
        ),
    }


if __name__ == "__main__":
    console.run(main)
