"""Trains the worked extensions of `examples/` beside DP-SGD and BAM, and writes their table.

python -m scripts.paper.extensions --out=docs/extensions_digits.json
python -m scripts.paper.extensions --out=docs/extensions_mnist.json --dataset=mnist --path=FOLDER \
  --num_steps=100 --expected_batch_size=256
"""

import statistics
from pathlib import Path

from absl import flags
from rich.console import Console

from bam import report, train
from bam.privacy.accounting import rounded_up
from configs import extensions
from scripts.lib import cli, tables

_OUT = flags.DEFINE_string("out", None, "JSON file to write, and a table beside it")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "what to train on")
_PATH = flags.DEFINE_string("path", "", "folder of MNIST in Parquet")
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "seeds of each, from 0", lower_bound=1)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 0, "steps; 0: as the config says", lower_bound=0)
_BATCH = flags.DEFINE_integer("expected_batch_size", 256, "l", lower_bound=1)
flags.mark_flags_as_required(["out"])


def main() -> None:
    """Trains everything in turn; runs with one seed share batches and noise."""
    with cli.one_line_errors():
        cli.use_compilation_cache()
        rows = [_train(name) for name in extensions.EXTENSIONS]
    out = Path(str(_OUT.value))
    report.write_json(out, {"device": report.device_name(), "runs": rows})
    columns = ["extension", "ε", "noise on the sum", "accuracy %", "gain over DP-SGD, points"]
    baseline = rows[0]["accuracies"]
    cells = []
    for row in rows:
        gains = [100 * (a - b) for a, b in zip(row["accuracies"], baseline, strict=True)]
        cells.append(
            [
                row["name"],
                rounded_up(row["epsilon"], ".2f"),
                f"{row['noise_multiplier']:.3f} × {row['sensitivity']:.3f}",
                _mean_and_sd([100 * x for x in row["accuracies"]]),
                "–" if row is rows[0] else _mean_and_sd(gains, "+"),
            ]
        )
    report.write_text(out.with_suffix(".md"), tables.markdown(columns, cells))
    Console(width=120).print(tables.terminal(columns, cells))


def _train(name: str) -> dict:
    prefix = "mnist_" if _DATASET.value == "mnist" else ""
    config = extensions.get_config(prefix + name)
    config.expected_batch_size = _BATCH.value
    config.num_steps = _NUM_STEPS.value
    config.eval.every = 0
    if _PATH.value:
        config.dataset.update({"path": _PATH.value, "source": "parquet"})
    built = train.build(config)
    summaries = [train.train(built, seed).summary for seed in range(_NUM_SEEDS.value)]
    facts = ("epsilon", "delta", "noise_multiplier", "num_steps", "sensitivity")
    found = {"name": name} | {key: summaries[0][key] for key in facts}
    print(name, [f"{s['test_accuracy']:.2%}" for s in summaries], flush=True)
    return found | {"accuracies": [s["test_accuracy"] for s in summaries]}


def _mean_and_sd(values: list[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{spread}"


if __name__ == "__main__":
    cli.run(main)
