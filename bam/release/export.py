"""What may be released of a run: its averaged weights, and what they guarantee.

A release is a folder of its own. Nothing in it comes from private data except the weights: it is
put together from a list of what may be in it, never by leaving things out.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jaxtyping import PyTree

import bam
from bam.core import pytree
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject, make_folder, one_line, replace, user_path, write_json, write_text
from bam.models import lora
from bam.privacy import checkpoint, statement
from bam.privacy.run import CHECKPOINTS
from bam.privacy.selection import CHOSEN
from bam.provenance import git_commit
from bam.release.load import NOT_OF, Released, Shapes, build, check_shapes, load
from bam.release.records import Run, read
from bam.training import parts
from bam.training.keys import BY_NAME

with needs("train"):
    import safetensors.numpy
    from flax import traverse_util

__all__ = ["CHOSEN", "Released", "export", "load"]

FILES = ("PRIVACY.md", "config.json", "model.json", "weights.npz", "weights.safetensors")

# Numbers, and names or expressions without a folder in them.
_PLAIN = re.compile(r"[\w.:|^$()*+?\[\]-]*")


def export(
    workdir: Path | str,
    out: Path | str,
    *,
    nominal: bool = False,
    own_model: str = "",
    stablehlo: bool = False,
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
      stablehlo: also write `model.stablehlo`, the network with its weights as a program.

    Raises:
      InputError: if the run is unfinished, not private, has a seed, keeps no weights, is a trial of
        a private search but not the chosen one, or its records disagree. FileExistsError: if `out`
        holds anything. Then nothing is written.
    """
    workdir, out = user_path(workdir), user_path(out)
    run = read(workdir)
    _check(run, nominal)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose another --out")
    facts = _model_facts(run)
    params = _averaged(run, build(facts, own_model).like)
    named = {name: np.asarray(x) for name, x in traverse_util.flatten_dict(params, sep="/").items()}
    facts["bfloat16"] = [name for name, x in named.items() if x.dtype == jnp.bfloat16]
    named |= {name: named[name].astype(np.float32) for name in facts["bfloat16"]}
    content = safetensors.numpy.save(named)
    facts["weights_sha256"] = hashlib.sha256(content).hexdigest()
    stated = settings(run)
    text = statement_of(run, made_by())
    make_folder(out.parent)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{partial} is left of an export that was cut short; delete it"
        ) from None
    try:
        (partial / "weights.safetensors").write_bytes(content)
        np.savez(partial / "weights.npz", allow_pickle=False, **named)
        write_json(partial / "model.json", facts)
        write_json(partial / "config.json", stated)
        write_text(partial / "PRIVACY.md", text)
        released = load(partial, own_model)
        if stablehlo:
            (partial / "model.stablehlo").write_bytes(as_stablehlo(released))
        replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def as_stablehlo(released: Released) -> bytes:
    """A release as a program of `jax.export`: uint8 images `[n, h, w, c]`, any n, to logits.

    `jax.export.deserialize(BYTES).call(images)` runs it without bam, on CPU, GPU or TPU; its
    StableHLO is what other compilers read. It names no place in the code, which would tell paths.
    """
    with needs("stablehlo"):
        import flatbuffers  # noqa: F401 (jax.export writes with it)
    images = jax_export.symbolic_args_specs(
        jax.ShapeDtypeStruct((1, *released.facts["image_shape"]), np.uint8), "n, ..."
    )
    program = jax.jit(lambda images: released.logits(released.params, images))
    with _without_places():
        exported = jax_export.export(program, platforms=("cpu", "cuda", "tpu"))(images)
    return bytes(exported.serialize())


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """JAX writes programs without the files and lines that they were traced from."""
    before = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.clear_caches()  # what was lowered before has them
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def _check(run: Run, nominal: bool) -> None:
    """Refuses what must not be released, or not with this statement."""
    where = f"the run in {run.workdir}"
    if not run.summary:
        raise InputError(f"{where} is not finished; only a finished one is released")
    if not run.private:
        raise InputError(f"{where} is not private; there is nothing to state")
    if fault := next(run.faults(), None):
        raise InputError(f"{where}: {fault}")
    run.check_chosen()
    if run.nominal and not nominal:
        raise InputError(
            f"{where} has a seed: whoever knows or guesses it can remove the noise. "
            "Train without --config.seed, or give --nominal to release it with that said"
        )


def made_by() -> str:
    """Version and commit of this code."""
    return f"bam {bam.__version__}, commit {git_commit()}"


def statement_of(run: Run, exported_by: str, released: str = statement.FOLDER) -> str:
    """The text of `PRIVACY.md` of a finished run."""
    # Of a data set of one's own the name is not told.
    named = {
        key: name if _is_plain(name) and key != "dataset.name" else ""
        for key, name in statement.parts_of(run.config).items()
    }
    facts = statement.fields_of_run(
        one_line(settings(run)),
        run.plan,
        run.summary,
        data=data_in_words(run),
        diagnosed=run.diagnosed,
        own_parts=one_line(named),
        features_words=parts.words("features", run.config.get("features", {}).get("name", "")),
        exported_by=exported_by,
        released=released,
    )
    return statement.text_of(facts)


def public_keys(config: JsonObject) -> list[str]:
    """The keys of a config that a release repeats: those of the table, and options of our parts.

    What is not there stays behind: the seed, paths, how fast it was computed, options of a user's
    own functions, any key yet to come.
    """
    public = [key.name for key in BY_NAME.values() if key.public]
    for section in parts.SECTIONS:
        name = config.get(section, {}).get("name", "")
        public += [f"{section}.{option}" for option in parts.public_options(section, name)]
    return public


def settings(run: Run) -> JsonObject:
    """What may be said of a run's config, nested as it is.

    Of a data set of one's own neither name nor folder is.
    """
    stated: JsonObject = {}
    for name in public_keys(run.config):
        section, _, key = name.rpartition(".")
        values = run.config.get(section, {}) if section else run.config
        if section and section in run.config:
            stated.setdefault(section, {})
        if key in values and _is_plain(values[key]):
            (stated[section] if section else stated)[key] = values[key]
    stated["dataset"]["name"] = _known_name(run) or "folder"
    return stated


def data_in_words(run: Run) -> str:
    """What may be said of a run's data."""
    name = _known_name(run)
    return f"the data set `{name}`" if name else "a data set of its author's own"


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return bool(_PLAIN.fullmatch(value))
    if isinstance(value, list | tuple):
        return all(isinstance(number, int | float) for number in value)
    return isinstance(value, bool | int | float)


def _known_name(run: Run) -> str:
    """The name of a well-known data set, or nothing: a name of one's own is part of a path."""
    name = run.summary.get("dataset", "")  # a run may be given its data
    return name if name in datasets.DATASETS and name == run.config["dataset"]["name"] else ""


def _model_facts(run: Run) -> JsonObject:
    """What it takes to make the network again; public, all of it."""
    section = run.config["model"]
    own = ":" in section["name"]
    public = public_keys(run.config)
    unknown = [
        k for k, v in section.items() if not (_is_plain(v) if own else f"model.{k}" in public)
    ]
    if unknown:
        raise InputError(f"a release cannot describe a model with {', '.join(unknown)}")
    features = run.summary.get("features")
    raw = json.loads((run.workdir / "summary.json").read_text())  # names in all their characters
    return {
        "model": section,
        "loss": run.config["loss"]["name"],
        "num_classes": run.summary["num_classes"],
        "classes": raw.get("classes") or [],
        "files": "turned upright by their EXIF, resized (Lanczos) until they cover `size`, height "
        "and width; of that the middle, in 1 (grey) or 3 (RGB) channels of 8 bits",
        "preprocessing": raw.get("preprocessing") or {},
        "image_shape": run.summary["image_shape"],
        "features": {
            k: v
            for k, v in run.config.get("features", {}).items()
            if f"features.{k}" in public and v is not None
        }
        | (run.summary.get("normalisation") or {} if features == "backbone" else {})
        | ({"digest": run.summary["features_digest"]} if features == "prior" else {}),
        "inputs": "(x / 255 - mean) / std of uint8 pixels x, (x - mean) / std of float features x; "
        "then scaled down to an L2 norm of at most input_clip_norm, unless that is 0",
        "mean": run.summary["mean"],
        "std": run.summary["std"],
        "input_clip_norm": run.config["input_clip_norm"],
        "precision": run.config["precision"],
    }


def _averaged(run: Run, like: Shapes) -> PyTree:
    """The averaged weights after the last step, and what was frozen, without low-rank factors."""
    newest = checkpoint.newest(run.workdir / CHECKPOINTS)
    if newest is None:
        raise InputError(
            f"the run in {run.workdir} kept no weights; train with --config.checkpoint.every "
            "above 0"
        )
    facts, arrays = checkpoint.read(newest, lambda name: name.startswith(("averaged/", "frozen/")))
    taken = run.summary.get("steps_taken", run.plan.num_steps)
    if facts["step"] != taken or one_line(facts["record"]) != run.plan_record:
        raise InputError(f"the newest checkpoint of {run.workdir} is not of the end of this run")
    named = {name.partition("/")[2]: jnp.asarray(array) for name, array in arrays}
    whole = lora.folded(traverse_util.unflatten_dict(named, sep="/"))
    named, names = traverse_util.flatten_dict(whole, sep="/"), pytree.names(like)
    if named.keys() != set(names):
        raise InputError(NOT_OF.format(newest))
    params = jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names])
    check_shapes(run.workdir, params, like)
    return params
