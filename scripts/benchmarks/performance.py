"""Writes the tables of docs/performance.md from the JSON files in benchmarks/.

python -m scripts.benchmarks.performance
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bam import files, tables
from bam.cli import command
from bam.data import datasets
from bam.files import JsonMapping, JsonObject
from bam.training import loop, trainer
from configs import cifar10
from scripts.benchmarks import timing
from scripts.lib import pages

PAGE = Path("docs/performance.md")
BATCHES_PER_EPOCH = 12  # as in CIFAR-10's config, so that batches vary as there
ONE_VIEW: JsonObject = {"augment.views": 1, "augment.shift": 0, "augment.flip": "none"}


def main() -> None:
    """Rewrites the tables between the page's markers."""
    text = PAGE.read_text(encoding="utf-8")
    files.write_text(PAGE, pages.fill(text, page_tables(Path("benchmarks"))))


def experiment(method: str, batch: int, changes: JsonMapping) -> trainer.Trainer:
    """A run on random colour images, with CIFAR-10's config and these changes of its keys."""
    config = cifar10.get_config(method)
    config.update({"expected_batch_size": batch, "accountant": "rdp"})
    config.update_from_flattened_dict(changes)
    rng, num_examples = np.random.default_rng(0), BATCHES_PER_EPOCH * batch
    images = rng.integers(0, 256, (num_examples, 32, 32, 3), dtype=np.uint8)
    split = datasets.Split(images, rng.integers(0, 10, num_examples, dtype=np.int32))
    half = np.full(3, 0.5, np.float32)
    return loop.build(config, datasets.Dataset("random", split, split, 10, half, half / 2))


# Key in the peers' JSON file -> its name for readers.
PEERS = {
    "ours_nonprivate": "ours, not private",
    "ours_dp_sgd": "ours, DP-SGD",
    "ours_bam_sam": "ours, BAM-SAM",
    "jax_vmap": "JAX, vmap of grad (DP-SGD as in a textbook)",
    "jax_loop": "JAX, one example at a time in a Python loop",
    "jax_privacy": "jax-privacy, clipped_grad",
    "jax_privacy_matmul": "jax-privacy, clipped_grad, our convolutions",
    "torch_nonprivate": "PyTorch, not private",
    "torch_loop": "PyTorch, one example at a time in a Python loop",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost clipping",
}
# Ratio -> keys of its numerator and its denominator.
RATIOS = {
    "DP-SGD / ours, not private": ("ours_dp_sgd", "ours_nonprivate"),
    "DP-SGD / PyTorch, not private": ("ours_dp_sgd", "torch_nonprivate"),
    "DP-SGD / Opacus's faster mode": ("ours_dp_sgd", "opacus"),
    "BAM-SAM / Opacus's faster DP-SGD": ("ours_bam_sam", "opacus"),
    "DP-SGD / jax-privacy": ("ours_dp_sgd", "jax_privacy"),
    "DP-SGD / jax-privacy, our convolutions": ("ours_dp_sgd", "jax_privacy_matmul"),
}
STEPS = {
    "nonprivate_ms": "not private",
    "dp_sgd_ms": "DP-SGD",
    "dp_sat_ms": "DP-SAT",
    "bam_sam_ms": "BAM-SAM",
    "bam_exact_ms": "BAM-exact",
    "dp_sgd_views_ms": "DP-SGD, {views} views",
    "bam_sam_views_ms": "BAM-SAM, {views} views",
    "bam_sam_one_view_ms": "BAM-SAM, {views} views, one-view ascent",
}


def page_tables(folder: Path) -> dict[str, str]:
    """Marker on the page -> table."""
    names = ("step_cpu", "peers_cpu", "peers_512_cpu", "step_h100")
    step, peers, peers_512, step_h100 = (files.read_json(folder / f"{x}.json") for x in names)
    small, large = (_with_best_of_opacus(x["observations"]) for x in (peers, peers_512))
    return {
        "ratios": _table(
            ("ratio", "batches of 32", "batches of 512"),
            [
                [label, *(_ratio(observed, *keys) for observed in (small, large))]
                for label, keys in RATIOS.items()
            ],
        ),
        "steps": _table(
            ("step", "CPU, ms per example", "H100, ms per example"),
            [
                [
                    label.format(**step),
                    _median(step["observations_ms"][key], ".1f"),
                    _median(step_h100["observations_ms"][key], ".3f"),
                ]
                for key, label in STEPS.items()
            ],
        ),
    }


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tables.markdown(tables.text(*headings), rows)


def _with_best_of_opacus(observed: Mapping[str, list[float]]) -> dict[str, list[float]]:
    modes = [observed[mode] for mode in ("opacus_hooks", "opacus_ghost")]
    return {**observed, "opacus": min(modes, key=statistics.median)}


def _ratio(observed: Mapping[str, list[float]], above: str, below: str) -> str:
    """Returns median and quartiles of the ratio, taken in each round.

    It returns "–" if one of the two was not measured.
    """
    if above not in observed or below not in observed:
        return "–"
    return _median([a / b for a, b in zip(observed[above], observed[below], strict=True)], ".2f")


def _median(values: list[float], form: str) -> str:
    """The median and, if there are several values, the quartiles in brackets."""
    median, low, high, _ = timing.summarize(values, 0.0)
    quartiles = f" [{low:{form}}, {high:{form}}]" if len(values) > 1 else ""
    return f"{median:{form}}{quartiles}"


if __name__ == "__main__":
    command.run_script(main)
