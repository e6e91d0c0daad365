"""Trains the worked extensions of `examples/` beside DP-SGD and BAM, and writes their table.

python -m scripts.paper.extensions --workdir=runs/extensions --out=docs/extensions_digits.json
python -m scripts.paper.extensions --workdir=runs/extensions --out=docs/extensions_mnist.json \
  --dataset=mnist --num_seeds=1 --config.num_steps=100 --config.dataset.source=parquet \
  --config.dataset.path=FOLDER
"""

from pathlib import Path

from absl import flags

from bam import devices, files
from bam.privacy.accounting import rounded_up
from configs.extensions import EXTENSIONS
from scripts.lib import cells, cli, tables

_OUT = flags.DEFINE_string("out", "", "JSON file to write, and a table beside it")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "what to train on")
flags.adopt_module_key_flags(cells)
cli.require("workdir", "out")

COLUMNS = tables.text(
    "extension", "ε", "noise on the sum", "accuracy %", "gain over DP-SGD, points"
)
FACTS = ("epsilon", "delta", "noise_multiplier", "num_steps", "sensitivity")


def main() -> None:
    """Trains what is missing; runs with one seed share batches and noise."""
    with cli.one_line_errors():
        found = cells.run_missing({name: _runs(name) for name in EXTENSIONS})
        found = {name: runs for name, runs in found.items() if runs}
        if not found:
            return
        rows, lines = [], []
        for name, runs in found.items():
            facts = {key: next(iter(runs.values())).summary[key] for key in FACTS}
            ours, theirs = cells.percent(runs), cells.percent(found.get("dp_sgd", {}))
            gains = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            rows.append({"name": name, **facts, "accuracies": [a / 100 for a in ours.values()]})
            lines.append(
                [
                    name,
                    rounded_up(facts["epsilon"], ".2f"),
                    f"{facts['noise_multiplier']:.3f} × {facts['sensitivity']:.3f}",
                    tables.mean_sd(list(ours.values()), ".1f"),
                    "–" if name == "dp_sgd" else tables.mean_sd(gains, "+.1f"),
                ]
            )
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(out, {"device": devices.name(), "runs": rows})
    tables.show(COLUMNS, lines, keep=out.with_suffix(".md"))


def _runs(name: str) -> cells.Cells:
    config = cells.method_config("mnist_" + name if _DATASET.value == "mnist" else name)
    config.eval.every = config.checkpoint.every = 0
    return cells.of_seeds(f"{_DATASET.value}/{name}", config)


if __name__ == "__main__":
    cli.run(main, ["--config=configs/extensions.py", "--config.expected_batch_size=256"])
