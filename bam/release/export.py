"""What may be released of a run: its averaged weights, and what they guarantee.

A release is a folder of its own. Nothing in it comes from private data except the weights: it is
put together from a list of what may be in it, never by leaving things out.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

import bam
from bam.data import datasets
from bam.extras import needs
from bam.files import (
    JsonObject,
    make_folder,
    one_line,
    read_json,
    replace,
    user_path,
    write_json,
    write_text,
)
from bam.privacy import statement
from bam.privacy.plan import PrivacyPlan
from bam.provenance import git_commit
from bam.release.load import Released, Shapes, build, check_shapes, load
from bam.training import checkpoint, finetune, registry

with needs("train"):
    import safetensors
    import safetensors.numpy
    from flax import traverse_util

__all__ = ["Released", "export", "load"]

FILES = ("PRIVACY.md", "config.json", "model.json", "weights.npz", "weights.safetensors")

# The settings that a release states, by section of the config. What is not here stays behind: the
# seed, paths, what timing chose, options of a user's own functions, any key yet to come.
SETTINGS = {
    "": (
        "epsilon", "delta", "accountant", "clip_norm", "expected_batch_size", "num_epochs",
        "num_steps", "spare_steps", "precision", "input_clip_norm", "ema_decay", "trainable",
        "init_fresh", "num_examples",
    ),
    "selection": ("trials_mean", "trials_shape", "score_noise_multiplier"),
    "clip": ("name", "gamma"),
    "mechanism": ("name", "bands"),
    "public_clip": ("quantile", "dataset", "source", "num_classes", "num_steps"),
    "method": ("name", "radius", "mix", "penalty", "ascent_views", "ascent_params"),
    "lora": ("rank", "targets"),
    "loss": ("name", "weights"),
    "model": ("name", "width", "depth", "scale_norm", "weight_standardisation"),
    "dataset": ("name", "source", "holdout", "num_classes", "group_size"),
    "features": ("name", "groups", "whiten", "mirror", "model", "size", "mean", "std"),
    "augment": ("views", "shift", "flip", "mixtures"),
    "optimizer": ("name", "learning_rate", "momentum", "per_clip_norm"),
    "eval": ("every",),
    "checkpoint": ("every",),
    "diagnostics": ("every", "num_examples"),
}  # fmt: skip
# Numbers, and names or expressions without a folder in them.
_PLAIN = re.compile(r"[\w.:|^$()*+?\[\]-]*")
# A file that a private search puts into the folder of the trial it has chosen, and no other.
CHOSEN = "chosen.json"
# What a run records for its release; 0.1.0 did not.
RECORDED = ("num_classes", "image_shape", "mean", "std", "noise", "sampling", "commit")


class _Run(NamedTuple):
    """The records of a finished run."""

    config: JsonObject
    plan: JsonObject
    summary: JsonObject
    diagnosed: bool  # whether there are figures that are not private


def export(
    workdir: Path | str, out: Path | str, *, nominal: bool = False, own_model: str = ""
) -> None:
    """Writes what may be released of a finished private run, all of it or nothing.

    The folder gets `weights.safetensors` and `weights.npz` (the same averaged weights under the
    same names, like `Dense_0/kernel`), `model.json` (what the network is), `config.json` (the
    settings) and `PRIVACY.md`.

    Args:
      workdir: the run's folder; it is only read. Its data set is not needed.
      out: folder to create; it may exist if it is empty.
      nominal: also take a run with a seed, whose ε holds against nobody who knows or guesses it;
        `PRIVACY.md` begins by saying so.
      own_model: of a run with a model of one's own, its MODULE:FUNCTION, which is then imported.

    Raises:
      ValueError: if the run is unfinished, not private, has a seed, keeps no weights, is a trial of
        a private search but not the chosen one, or its records disagree. FileExistsError: if `out`
        holds anything. Then nothing is written.
    """
    workdir, out = user_path(workdir), user_path(out)
    run = _read_run(workdir)
    _check(workdir, run, nominal)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose another --out")
    facts = _model_facts(run)
    params = _averaged(workdir, run, build(facts, own_model).like)
    named = {name: np.asarray(x) for name, x in traverse_util.flatten_dict(params, sep="/").items()}
    said = settings(run.config, run.summary["dataset"])
    text = statement.privacy(
        *(one_line(records) for records in (said, run.plan, run.summary)),
        data=data_in_words(run.config, run.summary["dataset"]),
        diagnosed=run.diagnosed,
        exported_by=f"bam {bam.__version__}, commit {git_commit()}",
    )

    make_folder(out.parent)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{partial} is left of an export that was cut short; delete it"
        ) from None
    try:
        (partial / "weights.safetensors").write_bytes(safetensors.numpy.save(named))
        np.savez(partial / "weights.npz", allow_pickle=False, **named)
        write_json(partial / "model.json", facts)
        write_json(partial / "config.json", said)
        write_text(partial / "PRIVACY.md", text)
        load(partial, own_model)
        replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_run(workdir: Path) -> _Run:
    if not (workdir / "config.json").exists():
        raise ValueError(f"{workdir} is not the folder of one run: it has no config.json")
    if not (workdir / "summary.json").exists():
        raise ValueError(f"the run in {workdir} is not finished; only a finished one is released")
    config, plan, summary = (
        read_json(workdir / f"{name}.json") for name in ("config", "plan", "summary")
    )
    metrics = workdir / "metrics.jsonl"
    diagnosed = metrics.exists() and '"not_private/' in metrics.read_text(encoding="utf-8")
    return _Run(config, plan, summary, diagnosed)


def _check(workdir: Path, run: _Run, nominal: bool) -> None:
    """Refuses what must not be released, or not with this statement."""
    config, plan, summary = run.config, run.plan, run.summary
    if not is_private(config, plan):
        raise ValueError(f"the run in {workdir} is not private; there is nothing to state")
    if found := next(faults(plan, summary, f"the run in {workdir}"), None):
        raise ValueError(found)
    if summary["seed"] is not None and not nominal:
        raise ValueError(
            f"the run in {workdir} has a seed: whoever knows or guesses it can remove the noise. "
            "Train without --config.seed, or give --nominal to release it with that said"
        )
    check_chosen(workdir, plan)


def is_private(config: JsonObject, plan: JsonObject) -> bool:
    """Whether the records of a run are of a private one; a stranger's need not agree."""
    return plan["epsilon"] is not None and registry.is_private(config["method"]["name"])


def check_chosen(workdir: Path, plan: JsonObject) -> None:
    """Refuses a trial of a private search that was not chosen: ε covers the chosen one alone."""
    if plan.get("selection") and not (workdir / CHOSEN).exists():
        raise ValueError(
            f"the run in {workdir} is one trial of a private search, and not the chosen one: ε "
            "covers the chosen one alone"
        )


def faults(plan: JsonObject, summary: JsonObject, run: str = "this run") -> Iterator[str]:
    """What in the records of a finished private run speaks against its ε, a line each."""
    missing = [key for key in RECORDED if key not in summary]
    if missing:
        yield (
            f"{run} was trained by a version that did not record {', '.join(missing)} and "
            "whose noise falls short of its claim (docs/privacy.md); train again"
        )
    if any(summary.get(key) != value for key, value in plan.items()):
        yield f"plan.json and summary.json of {run} disagree"
    begun = summary.get("steps_begun", 0)
    if begun > plan["num_steps"]:
        yield f"{run}: {begun} steps were begun, the plan pays for {plan['num_steps']}"
    try:
        PrivacyPlan.from_json(plan).check_epsilon()
    except ValueError as error:
        yield f"{run}: {error}"


def settings(config: JsonObject, dataset: str) -> JsonObject:
    """What may be said of a config, nested as it is; `dataset` is the name that its run recorded.

    Of a data set of one's own neither name nor folder is.
    """
    found: JsonObject = {}
    for section, keys in SETTINGS.items():
        if section == "selection" and section not in config:
            continue
        values = config.get(section, {}) if section else config
        plain = {key: values[key] for key in keys if key in values and _is_plain(values[key])}
        found |= {section: plain} if section else plain
    found["dataset"]["name"] = _known_name(config, dataset) or "folder"
    return found


def data_in_words(config: JsonObject, dataset: str) -> str:
    """What may be said of the data that a config's run recorded as `dataset`."""
    name = _known_name(config, dataset)
    return f"the data set `{name}`" if name else "a data set of its author's own"


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return bool(_PLAIN.fullmatch(value))
    if isinstance(value, list | tuple):
        return all(isinstance(number, int | float) for number in value)
    return isinstance(value, bool | int | float)


def _known_name(config: JsonObject, name: str) -> str:
    """The name of a well-known data set, or nothing: a name of one's own is part of a path."""
    return name if name in datasets.DATASETS and name == config["dataset"]["name"] else ""


def _model_facts(run: _Run) -> JsonObject:
    """What it takes to make the network again; public, all of it."""
    section = run.config["model"]
    own = ":" in section["name"]
    unknown = [
        k for k, v in section.items() if not (_is_plain(v) if own else k in SETTINGS["model"])
    ]
    if unknown:
        raise ValueError(f"a release cannot describe a model with {', '.join(unknown)}")
    return {
        "model": section,
        "num_classes": run.summary["num_classes"],
        "image_shape": run.summary["image_shape"],
        "features": {
            k: v
            for k, v in run.config.get("features", {}).items()
            if k in SETTINGS["features"] and v is not None
        },
        "inputs": "(x / 255 - mean) / std of uint8 pixels x, (x - mean) / std of float features x; "
        "then scaled down to an L2 norm of at most input_clip_norm, unless that is 0",
        "mean": run.summary["mean"],
        "std": run.summary["std"],
        "input_clip_norm": run.config["input_clip_norm"],
        "precision": run.config["precision"],
    }


def _averaged(workdir: Path, run: _Run, like: Shapes) -> PyTree:
    """The averaged weights after the last step, and what was frozen: nothing else is read."""
    trained, frozen = finetune.split(like, run.config.get("trainable", ""))
    wanted = {"averaged": trained, "step": jax.ShapeDtypeStruct((), np.int32)}
    wanted |= {"frozen": frozen} if frozen else {}
    newest = checkpoint.read(workdir / "checkpoints", wanted)
    if newest is None:
        raise ValueError(
            f"the run in {workdir} kept no weights; train with --config.checkpoint.every above 0"
        )
    state, facts = newest
    taken = run.summary.get("steps_taken", run.plan["num_steps"])
    if int(state["step"]) != taken or facts["identity"]["plan"] != run.plan:
        raise ValueError(f"the newest checkpoint of {workdir} is not of the end of this run")
    params = finetune.merge(state["averaged"], state.get("frozen", {}))
    check_shapes(workdir, params, like)
    return params
