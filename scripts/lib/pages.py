"""Puts the tables that commands wrote beside their results into the pages that show them.

python -m scripts.lib.pages
"""

import re
from collections.abc import Mapping
from pathlib import Path

from bam import files
from bam.cli import console

# Page -> place on it -> file of the table.
PAGES = {
    "docs/bias.md": {
        "training": "docs/figures/figure2_effects.md",
        "start": "docs/figures/lambda_start.md",
        "end of training": "docs/figures/lambda_end.md",
        "against plain": "docs/figures/lambda_end_against_plain.md",
        "accuracy": "docs/figures/bias_accuracy.md",
        "on features": "docs/figures/scattering/figure2_effects.md",
    },
    "docs/benchmark.md": {
        "benchmark": "docs/results/benchmark/benchmark.md",
        "benchmark, BAM": "docs/results/benchmark/benchmark_bam.md",
    },
    "docs/bias_benchmark.md": {"bias benchmark": "docs/results/bias_benchmark.md"},
    "docs/verification.md": {
        "audit": "docs/audit.md",
        "one run": "docs/audit_one_run.md",
    },
    "docs/batches.md": {
        "authors": "docs/results/authors_epsilon.md",
        "fixed size": "docs/results/batches/digits_fixed_size.md",
        "poisson": "docs/results/batches/digits_poisson.md",
        "mechanisms": "docs/results/batches/mechanisms.md",
        "allocation": "docs/results/batches/mechanisms_epsilon.md",
        "digits": "docs/results/correlated/digits.md",
        "digits, SGD": "docs/results/correlated/digits_sgd.md",
        "mnist": "docs/results/correlated/mnist.md",
        "cifar10": "docs/results/correlated/cifar10.md",
    },
    "docs/choose.md": {"clip norm": "docs/results/clip_norm.md"},
    "docs/own_images.md": {
        **{x: f"docs/results/own_images/{x}.md" for x in ("import", "show", "train", "report")},
        **{x: f"docs/results/own_images/{x}.md" for x in ("export", "statement", "size")},
        "stream": "benchmarks/stream_cpu.md",
    },
    "docs/finetuning.md": {
        "fine-tuning": "docs/results/finetuning/cifar10.md",
        "trainable": "benchmarks/trainable_cpu.md",
        "lora": "benchmarks/lora_cpu.md",
    },
    "docs/results_features.md": {
        "features": "docs/results/scattering/table1.md",
        "features, normalised": "docs/results/scattering/search_C0.1.md",
        "features, clipped": "docs/results/scattering/search_C50.md",
        "features, eps1_C50": "docs/results/scattering/strengths_eps1_C50.md",
        "features, eps1_C0.1": "docs/results/scattering/strengths_eps1_C0.1.md",
        "features, eps1_slower": "docs/results/scattering/strengths_eps1_slower.md",
        "features, eps1_slow": "docs/results/scattering/strengths_eps1_slow.md",
        "features, C50": "docs/results/scattering/strengths_C50.md",
        "features, searched at 1, normalised": "docs/results/scattering/search_eps1_C0.1.md",
        "features, searched at 1, clipped": "docs/results/scattering/search_eps1_C50.md",
        "features, strengths": "docs/results/scattering/strengths.md",
        "features, CNN": "docs/results/cifar10_scattering_cnn/table1.md",
        "features, CNN searched": "docs/results/cifar10_scattering_cnn/search.md",
    },
    "docs/results_resnet.md": {
        "medium": "docs/results/cifar10_medium/table1.md",
        "medium, searched": "docs/results/cifar10_medium/search.md",
        "medium, searched finer": "docs/results/cifar10_medium/finer/search.md",
        "medium, two seeds": "docs/results/cifar10_medium/two_seeds/search.md",
        "medium, one rate": "docs/results/cifar10_medium/one_rate/table1.md",
        "medium, double": "docs/results/cifar10_medium/double/table1.md",
        "medium, larger": "docs/results/cifar10_medium/larger.md",
        "medium, bias": "docs/figures/batch_2048/figure2_effects.md",
        "medium, strengths": "docs/results/cifar10_medium/strengths.md",
        "medium, double searched": "docs/results/cifar10_medium/double/search.md",
    },
    "docs/results_prior.md": {
        **{f"prior, {x}": f"docs/results/prior/epsilon{x}.md" for x in (1, 3, 8)},
        **{f"prior, searched at {x}": f"docs/results/prior/search{x}.md" for x in (1, 3, 8)},
        "prior, private": "docs/results/prior/private.md",
    },
    "docs/results_other.md": {
        "features, mnist": "docs/results/mnist_scattering/table1.md",
        "logistic": "docs/results/logistic.md",
    },
    "docs/selection.md": {
        "costs": "docs/results/selection/digits_epsilon.md",
        "digits": "docs/results/selection/digits.md",
    },
    "docs/users.md": {"digits": "docs/results/users/digits.md"},
}


def main() -> None:
    """Rewrites every page's tables; a table that is not there yet says so."""
    with console.one_line_errors():
        for page, places in PAGES.items():
            path = Path(page)
            kept = {place: Path(table) for place, table in places.items()}
            tables = {
                place: file.read_text(encoding="utf-8") if file.exists() else "Not run.\n"
                for place, file in kept.items()
            }
            files.write_text(path, fill(path.read_text(encoding="utf-8"), tables))


def fill(text: str, found: Mapping[str, str]) -> str:
    """A page with the text between `<!-- NAME -->` and `<!-- end -->` replaced."""
    for name, table in found.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"the page has no place for {name}: <!-- {name} --> … <!-- end -->")
        text = place.sub(lambda m, table=table: f"{m[1]}\n{table}\n{m[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    console.run(main)
