"""What a search is worth once ε pays for it: whole searches, paid for and not, and none.

python -m scripts.paper.private_search --config=configs/digits.py --workdir=runs/selection \
  --out=docs/results/selection/digits.json --num_seeds=3

Every search draws its trials from the same settings of DP-SGD, all of --learning_rates at all of
--clip_norms, and judges them on the training images. For each one, the same trials are trained once
more as if the choice were free. The test split judges what was chosen, and chooses nothing.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, sweep, tables
from bam.privacy import selection
from bam.privacy.accounting import rounded_up
from bam.training import config as base
from bam.training import loop, provenance
from scripts.lib import private_search

_OUT = flags.DEFINE_string("out", "", "JSON file to write; its tables go beside it")
_RATES = flags.DEFINE_list("learning_rates", "0.0005,0.002,0.01,0.05", "to try")
_CLIP_NORMS = flags.DEFINE_list("clip_norms", "0.1,1", "to try, each with every rate")
flags.adopt_module_key_flags(sweep)
flags.adopt_module_key_flags(private_search)
console.require("config", "workdir", "out")

GIVEN = ("optimizer.learning_rate", "clip_norm")
COLUMNS: tables.Columns = {
    "DP-SGD with": lambda row: row["what"],
    "ε claimed": lambda row: rounded_up(row["claimed"], ".2f"),
    "ε in truth": lambda row: rounded_up(row["epsilon"], ".2f"),
    "σ": lambda row: f"{row['noise_multiplier']:.2f}",
    "repeats": lambda row: str(len(row["accuracies"])),
    "test accuracy, %": lambda row: tables.mean_sd(row["accuracies"], ".1f"),
}


def main() -> None:
    """Trains what is missing, then writes and prints both tables."""
    with console.one_line_errors():
        console.check_writable(_OUT.value)
        if private_search.SCORE.value != "training":
            raise ValueError("--score=held_out would leave the test split unread")
        console.use_compilation_cache()
        found = _run(Path(sweep.WORKDIR.value))
        if found is None:
            return
        out = Path(_OUT.value)
        files.write_json(out, found | {"versions": provenance.versions()})
    costs = out.with_name(f"{out.stem}_epsilon.md")
    tables.show(private_search.COSTS, found["costs"], keep=costs)
    tables.show(COLUMNS, found["rows"], keep=out.with_suffix(".md"))


def _run(workdir: Path) -> dict[str, Any] | None:
    """Both tables; None if time is up before."""
    should_stop = console.stop_after(sweep.MAX_SECONDS.value)
    say = functools.partial(print, flush=True)
    config = sweep.method_config("dp_sgd", {*GIVEN, *private_search.FIXED})
    free = {
        f"{rate}_{clip_norm}": _at(config, float(rate), float(clip_norm))
        for rate, clip_norm in itertools.product(_RATES.value, _CLIP_NORMS.value)
    }
    paid_grid = {name: private_search.as_trial(setting) for name, setting in free.items()}
    paid = []
    numbers = range(sweep.NUM_SEEDS.value)
    for number in numbers:
        link = private_search.search(paid_grid, workdir / f"paid{number}", should_stop, say)
        if link is None:
            return None
        paid.append(sweep.read(link))

    own = [config["optimizer"]["learning_rate"], config.clip_norm]
    fixed = {"base": [base.get_config().optimizer.learning_rate, 1.0], "own": own}
    groups = {name: sweep.of_seeds(name, _at(config, *values)) for name, values in fixed.items()}
    for number in numbers:
        drawn = files.read_json(workdir / f"paid{number}" / "trials.json")["trials"]
        groups[f"unpaid{number}"] = {
            f"unpaid{number}/seed{i}": _seeded(free[trial["setting"]], 1000 * number + i)
            for i, trial in enumerate(drawn)
        }
    all_cells = {name: cell for group in groups.values() for name, cell in group.items()}
    sweep.run(all_cells, workdir, should_stop, sweep.print_event)
    runs = {name: sweep.finished(group, workdir) for name, group in groups.items()}
    if any(len(runs[name]) < len(group) for name, group in groups.items()):
        return None
    chosen = [_best(groups[name], runs[name], workdir) for name in (f"unpaid{n}" for n in numbers)]

    plan = loop.build(next(iter(paid_grid.values()))).plan
    assert plan.selection is not None
    alone = chosen[0].summary
    mechanism = {k: alone[k] for k in ("noise_multiplier", "sampling_prob", "num_steps", "delta")}
    in_truth = selection.epsilon(plan.selection, **mechanism)
    rates = {name: f"{rate:g}, C = {clip_norm:g}" for name, (rate, clip_norm) in fixed.items()}
    rows = [
        _row("a search that is paid for", paid, plan.epsilon),
        _row("the same trials, the choice not paid for", chosen, in_truth),
        _row(f"the library's defaults, rate {rates['base']}", list(runs["base"].values())),
        _row(f"the config's, found earlier: rate {rates['own']}", list(runs["own"].values())),
    ]
    return {"selection": plan.to_json(), "costs": private_search.costs(plan), "rows": rows}


def _at(config: ConfigDict, rate: float, clip_norm: float) -> ConfigDict:
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(dict(zip(GIVEN, (rate, clip_norm), strict=True)))
    changed.eval.every = 0
    return changed


def _seeded(config: ConfigDict, seed: int) -> ConfigDict:
    seeded = config.copy_and_resolve_references()
    seeded.seed = seed
    return seeded


def _best(group: sweep.Cells, runs: dict[str, sweep.Run], workdir: Path) -> sweep.Run:
    """The run of the best score, as noisy as those that are paid for; drawn once for each run."""
    noise = float(flags.FLAGS.score_noise)
    scores = {}
    for name, config in group.items():
        path = workdir / name / "score.json"
        if not path.exists():
            scored = private_search.noised_score(
                loop.build(config), config.seed, workdir / name, noise
            )
            files.write_json(path, {"score": scored})
        scores[name] = files.read_json(path)["score"]
    return runs[max(scores, key=lambda name: scores[name])]


def _row(what: str, runs: list[sweep.Run], epsilon: float | None = None) -> dict[str, Any]:
    """A row of the table; ε in truth is the claimed one if nothing else is said."""
    first = runs[0].summary
    return {
        "what": what,
        "claimed": first["epsilon"],
        "epsilon": first["epsilon"] if epsilon is None else epsilon,
        "noise_multiplier": first["noise_multiplier"],
        "accuracies": [100 * run.summary["test_accuracy"] for run in runs],
    }


if __name__ == "__main__":
    console.run(main, defaults=["--num_seeds=3", "--score=training"])
