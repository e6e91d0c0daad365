"""Trains the worked extensions of `examples/` beside DP-SGD and BAM, and writes their table.

python -m scripts.paper.extensions --workdir=runs/extensions --out=docs/extensions_digits.json
python -m scripts.paper.extensions --workdir=runs/extensions --out=docs/extensions_mnist.json \
  --dataset=mnist --num_seeds=1 --config.num_steps=100 --config.dataset.source=parquet \
  --config.dataset.path=FOLDER
"""

from pathlib import Path

from absl import flags

from bam import files
from bam.cli import console, sweeps, tables
from bam.privacy.accounting import rounded_up
from bam.training import devices
from configs.extensions import EXTENSIONS

_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "what to train on")
flags.adopt_module_key_flags(sweeps)
console.require("workdir", "out")

COLUMNS: tables.Columns = {
    "extension": lambda row: row["name"],
    "ε": lambda row: rounded_up(row["epsilon"], ".2f"),
    "noise on the sum": lambda row: f"{row['noise_multiplier']:.3f} × {row['sensitivity']:.3f}",
    "seeds": lambda row: str(len(row["seeds"])),
    "accuracy %": lambda row: tables.interval(row["accuracy"], ".2f"),
    **tables.gain("gain", lambda row: row["name"] == "dp_sgd"),
}
FACTS = ("epsilon", "delta", "noise_multiplier", "num_steps", "sensitivity")


def main() -> None:
    """Trains what is missing; runs with one seed share batches and noise."""
    with console.one_line_errors():
        found = sweeps.run_missing({name: _runs(name) for name in EXTENSIONS})
        rows = []
        for name, runs in found.items():
            if runs:
                summary = next(iter(runs.values())).summary
                facts = {key: summary[key] for key in FACTS}
                rows.append({"name": name, **facts, **sweeps.judged(runs, found["dp_sgd"])})
        if not rows:
            return
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(out, {"device": devices.name(), "runs": rows})
    tables.show(COLUMNS, rows, keep=out.with_suffix(".md"))


def _runs(name: str) -> sweeps.Cells:
    config = sweeps.method_config("mnist_" + name if _DATASET.value == "mnist" else name)
    config.eval.every = config.checkpoint.every = 0
    return sweeps.of_seeds(f"{_DATASET.value}/{name}", config)


if __name__ == "__main__":
    console.run(main, ["--config=configs/extensions.py", "--config.expected_batch_size=256"])
