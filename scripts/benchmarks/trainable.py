"""Time and memory per example of training all parameters, some, or the last layer alone.

python -m scripts.benchmarks.trainable --out=benchmarks/trainable_cpu
python -m scripts.benchmarks.trainable --model=vit_ti16 --size=224 --batch=8 --methods=dp_sgd \
  --out=benchmarks/lora_cpu
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
_MODEL = flags.DEFINE_enum("model", "resnet9", ["resnet9", "vit_ti16", "vit_s16"], "the network")
_SIZE = flags.DEFINE_integer("size", 32, "height and width of the images", lower_bound=16)
_WIDTH = flags.DEFINE_integer("width", 16, "of ResNet-9", lower_bound=1)
_TRIALS = flags.DEFINE_integer("trials", 7, "rounds through all", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "steps per round", lower_bound=1)
console.require("out")

# What is trained, with the rank of low-rank factors, of a Vision Transformer.
OF_VIT = {
    "last layer": ("head", 0),
    "low-rank factors (rank 8) and last layer": ("lora|head", 8),
    "all": ("", 0),
}
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
        of_resnet = {name: (names.format(head="Dense_0"), 0) for name, names in TRAINED.items()}
        trained_parts = of_resnet if _MODEL.value == "resnet9" else OF_VIT
        cases = {
            (trained, method): Case(trained, method, *part)
            for trained, part in trained_parts.items()
            for method in _METHODS.value
        }
    seconds = timing.measure(
        {str(key): case.step for key, case in cases.items()}, _TRIALS.value, _REPEATS.value
    )
    rows = [case.row(seconds[str(key)]) for key, case in cases.items()]
    settings = ("model", "size", "batch", "microbatch", "width", "trials", "repeats")
    out = Path(_OUT.value)
    named = {name: flags.FLAGS[name].value for name in settings}
    timing.keep(Path(f"{out}.json"), {**named, "rows": rows})
    tables.show(COLUMNS, rows, left=("method",), keep=Path(f"{out}.md"))


class Case:
    """A compiled step on random images, and its state."""

    def __init__(self, trained: str, method: str, names: str, rank: int) -> None:
        """Compiles it: parameters of these names are trained, of factors of this rank."""
        config = cifar10.get_config(method)
        config.update({"trainable": names, "num_steps": 1, "accountant": "rdp"})
        config.lora.update({"rank": rank, "targets": "qkv|proj|fc"})
        config.expected_batch_size, config.microbatch_size = _BATCH.value, _MICROBATCH.value
        config.model.width = _WIDTH.value
        if _MODEL.value != "resnet9":
            config.model = {"name": _MODEL.value, "width": 1}
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
    """Random images in colour."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, _SIZE.value, _SIZE.value, 3), dtype=np.uint8)
    split = datasets.Split(images, rng.integers(0, 10, num, dtype=np.int32))
    channels = np.full(3, 0.5, np.float32)
    return datasets.Dataset("random", split, split, 10, channels, channels / 2)


if __name__ == "__main__":
    console.run(main)
