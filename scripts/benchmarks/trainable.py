"""Time and memory per example of training all parameters, some, or the last layer alone.

python -m scripts.benchmarks.trainable --out=benchmarks/trainable_cpu
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from bam.cli import console, tables, timing
from bam.core import sampling
from bam.data import datasets
from bam.training import trainer
from configs import cifar10
from configs.finetune import TRAINED

_OUT = flags.DEFINE_string("out", "", "path without extension: .json and .md are written")
_METHODS = flags.DEFINE_list("methods", "dp_sgd,bam_sam", "methods to time")
_BATCH = flags.DEFINE_integer("batch", 32, "examples per step", lower_bound=1)
_MICROBATCH = flags.DEFINE_integer("microbatch", 1, "examples per group", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 16, "of ResNet-9", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 7, "rounds through all", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "steps per round", lower_bound=1)
console.require("out")

HEAD = "Dense_0"  # of ResNet-9
COLUMNS: tables.Columns = {
    "trained": lambda row: row["trained"],
    "method": lambda row: row["method"],
    "parameters": lambda row: f"{row['num_params']:,}",
    "ms per example": lambda row: f"{row['ms']:.3f}",
    "quartiles": lambda row: "{:.3f}–{:.3f}".format(*row["quartiles_ms"]),
    "state, MB": lambda row: f"{row['state_mb']:.2f}",
    "held during a step, MB": lambda row: f"{row['temporary_mb']:.2f}",
}


def main() -> None:
    """Compiles every step, times them in turn, writes numbers and table."""
    console.use_compilation_cache()
    with console.one_line_errors():
        cases = {
            (trained, method): Case(trained, method)
            for trained in TRAINED
            for method in _METHODS.value
        }
    seconds = timing.measure(
        {str(key): case.step for key, case in cases.items()}, _TRIALS.value, _REPEATS.value
    )
    rows = [case.row(seconds[str(key)]) for key, case in cases.items()]
    settings = ("batch", "microbatch", "width", "trials", "repeats")
    out = Path(_OUT.value)
    named = {name: flags.FLAGS[name].value for name in settings}
    timing.keep(Path(f"{out}.json"), {**named, "rows": rows})
    tables.show(COLUMNS, rows, left=("method",), keep=Path(f"{out}.md"))


class Case:
    """A compiled step of ResNet-9 on random images, and its state."""

    def __init__(self, trained: str, method: str) -> None:
        """Compiles it."""
        config = cifar10.get_config(method)
        config.update(
            {"trainable": TRAINED[trained].format(head=HEAD), "num_steps": 1, "accountant": "rdp"}
        )
        config.expected_batch_size, config.microbatch_size = _BATCH.value, _MICROBATCH.value
        config.model.width = _WIDTH.value
        config.augment.update({"views": 1, "shift": 0, "flip": "none"})
        self.names = {"trained": trained, "method": method}
        self.built = trainer.build(config, random_images(2 * _BATCH.value))
        self.state = self.built.init(0)
        self.num_bytes = sum(x.nbytes for x in jax.tree.leaves(self.state))
        rows = sampling.pad(np.arange(_BATCH.value), _BATCH.value, 0, 0)
        self.given = self.built.place(self.built.dataset.train), rows
        self.compiled, self.seconds = timing.compile_timed(self.built.step, self.state, *self.given)

    def step(self) -> Any:
        """Takes one step."""
        self.state = self.compiled(self.state, *self.given)
        return self.state.step

    def row(self, seconds: list[float]) -> dict[str, Any]:
        """What was found, for the table."""
        observed = [1e3 * s / _BATCH.value for s in seconds]
        found = timing.summarize(observed, self.seconds)
        planned = self.compiled.memory_analysis()
        return {
            **self.names,
            "num_params": self.built.num_params,
            "num_frozen": self.built.num_frozen,
            "ms": found.median,
            "quartiles_ms": [found.low, found.high],
            "observations_ms": observed,
            "state_mb": self.num_bytes / 1e6,
            "temporary_mb": planned.temp_size_in_bytes / 1e6,
            "compile_seconds": self.seconds,
        }


def random_images(num: int) -> datasets.Dataset:
    """Random images of CIFAR-10's shape."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
    split = datasets.Split(images, rng.integers(0, 10, num, dtype=np.int32))
    channels = np.full(3, 0.5, np.float32)
    return datasets.Dataset("random", split, split, 10, channels, channels / 2)


if __name__ == "__main__":
    console.run(main)
