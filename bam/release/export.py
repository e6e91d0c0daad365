"""Writes a release: a run's averaged weights and their guarantee, in a folder of its own.

Nothing in it comes from private data except the weights and, if the clip has slots, the share of
gradients clipped; ε covers both. Its contents come from a list of what may be published, never from
leaving things out, so whatever is new in a run stays private.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jaxtyping import PyTree

import bam
from bam import part_table
from bam.core import pytree
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject, make_folder, replace, user_path, write_json, write_text
from bam.models import lora
from bam.privacy import checkpoint, statement
from bam.privacy.recorded_plan import PLAN
from bam.privacy.run import CHECKPOINTS
from bam.privacy.selection import CHOSEN
from bam.provenance import git_commit
from bam.release.load import WRONG_WEIGHTS, Released, Shapes, build, check_shapes, load
from bam.release.notes import read as read_notes
from bam.release.records import RunRecords, read
from bam.text import one_line
from bam.training.keys import BY_NAME

with needs("train"):
    import safetensors.numpy
    from flax import traverse_util

__all__ = ["CHOSEN", "Released", "export", "load"]

FILES = (
    *("PRIVACY.md", "config.json", "model.json", "plan.json"),
    *("weights.npz", "weights.safetensors"),
)

# Numbers, names and expressions. Without slashes, so it cannot be a path of this machine.
_PLAIN = re.compile(r"[\w.:|^$()*+?\[\]-]*")


def export(
    workdir: Path | str,
    out: Path | str,
    *,
    nominal: bool = False,
    own_model: str = "",
    stablehlo: bool = False,
    weights: str = "",
    notes: Path | str = "",
) -> None:
    """Writes the release of a finished private run, either complete or not at all.

    The folder gets `weights.safetensors` and `weights.npz` (the same averaged weights under the
    same names, like `Dense_0/kernel`), `model.json` (a description of the network), `config.json`
    (the public settings), `plan.json` (the privacy plan) and `PRIVACY.md`.

    Args:
      workdir: the run's folder, which is only read. The data set is not needed.
      out: folder to create; it may exist if it is empty.
      nominal: also release a run with a seed. Its ε does not hold against whoever knows or guesses
        the seed, and `PRIVACY.md` begins by saying so.
      own_model: MODULE:FUNCTION of the network, which is imported, if it is the user's own.
      stablehlo: also write `model.stablehlo`, the network with its weights as a program. It
        contains the map of images to features, too, unless that is the user's own.
      weights: for this program, the weights of the backbone that made the features; "": the file
        that the run read.
      notes: the publisher's form, see `bam.release.notes`, whose answers `PRIVACY.md` repeats; "":
        none.

    Raises:
      InputError: if the run is unfinished, not private, has a seed without `nominal`, has no
        checkpoint, is a trial of a private search but not the chosen one, or its records disagree;
        or if `notes` is not a form with an answer.
        FileExistsError: if `out` is not empty. In each case nothing is written.
    """
    workdir, out = user_path(workdir), user_path(out)
    run = read(workdir)
    _check(run, nominal)
    answers = read_notes(user_path(notes)) if notes else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty; choose another --out")
    description = _describe_model(run)
    params = _read_weights(run, build(description, own_model).like)
    leaves = traverse_util.flatten_dict(params, sep="/")
    arrays = {name: np.asarray(x) for name, x in leaves.items()}
    # As float32, which loses nothing: NumPy's files and most readers lack bfloat16.
    description["bfloat16"] = [name for name, x in arrays.items() if x.dtype == jnp.bfloat16]
    arrays |= {name: arrays[name].astype(np.float32) for name in description["bfloat16"]}
    content = safetensors.numpy.save(arrays)
    description["weights_sha256"] = hashlib.sha256(content).hexdigest()
    if stablehlo and run.summary.get("features") == "backbone":
        weights = weights or run.config["features"]["weights"]
    stated = settings(run)
    text = statement_of(run, made_by(), notes=answers)
    make_folder(out.parent)
    # Written beside `out` and renamed, so `out` is never half a release.
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{partial} is left from an export that was cut short; delete it"
        ) from None
    try:
        (partial / "weights.safetensors").write_bytes(content)
        np.savez(partial / "weights.npz", allow_pickle=False, **arrays)
        write_json(partial / "model.json", description)
        write_json(partial / "config.json", stated)
        # The plan's own fields alone, because the run's file also has others.
        write_json(partial / PLAN, run.plan.to_json())
        write_text(partial / "PRIVACY.md", text)
        # Read back first: a release that cannot be loaded is not published.
        released = load(partial, own_model, weights)
        if stablehlo:
            (partial / "model.stablehlo").write_bytes(as_stablehlo(released))
        replace(partial, out)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def as_stablehlo(released: Released) -> bytes:
    """A release as a program of `jax.export`: images `[n, h, w, c]`, for any n, to logits.

    The images are what `released.takes` says, mostly uint8 pixels; a map to features is part of the
    program. `jax.export.deserialize(BYTES).call(images)` runs it without bam, on CPU, GPU or TPU.
    Other compilers read its StableHLO. It contains no source locations, because these are paths.

    Raises:
      InputError: for features of a version that did not record the images' size.
    """
    with needs("stablehlo"):
        import flatbuffers  # noqa: F401 (jax.export writes with it)
    if (like := released.takes) is None:
        raise InputError(
            "the run did not record the size or the type of its images: leave out --stablehlo, "
            "or train it again with this version of bam"
        )
    one = jax.ShapeDtypeStruct((1, *like.shape), like.dtype)
    images = jax_export.symbolic_args_specs(one, "n, ...")
    program = jax.jit(lambda images: released.logits(released.params, images))
    with _without_locations():
        exported = jax_export.export(program, platforms=("cpu", "cuda", "tpu"))(images)
    return bytes(exported.serialize())


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Within it, JAX lowers programs without the files and lines that they were traced from."""
    before = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.clear_caches()  # cached lowerings still have locations
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def _check(run: RunRecords, nominal: bool) -> None:
    """InputError for a run that must not be released, or not with its statement."""
    name = f"the run in {run.workdir}"
    if not run.summary:
        raise InputError(f"{name} is not finished; continue it with bam train before bam export")
    if not run.private:
        raise InputError(f"{name} is not private; only private runs are released")
    if fault := next(run.faults(), None):
        raise InputError(f"{name}: {fault}")
    run.check_chosen()
    if run.nominal and not nominal:
        raise InputError(
            f"{name} has a seed: whoever knows or guesses it can remove the noise. "
            "Train without --config.seed, or add --nominal, and PRIVACY.md will say so"
        )


def made_by() -> str:
    """Version and commit of this code."""
    return f"bam {bam.__version__}, commit {git_commit()}"


def statement_of(
    run: RunRecords,
    exported_by: str,
    released: str = statement.FOLDER,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Returns the text of `PRIVACY.md` of a finished run.

    `notes` are as for `statement.fields_of_run`.
    """
    # The name of a user's own data set stays private, as in `settings`.
    own_parts = {
        key: name if _is_plain(name) and key != "dataset.name" else ""
        for key, name in statement.parts_of(run.config).items()
    }
    content = statement.fields_of_run(
        one_line(settings(run)),
        run.plan,
        run.summary,
        data=data_in_words(run),
        diagnosed=run.diagnosed,
        own_parts=one_line(own_parts),
        notes=notes,
        exported_by=exported_by,
        released=released,
    )
    return statement.text_of(content)


def public_keys(config: JsonObject) -> list[str]:
    """The keys of a config that a release repeats: public keys, and public options of bam's parts.

    All others stay private: the seed, paths, settings of speed, options of a user's own functions,
    and every key that is not marked as public.
    """
    public = [key.name for key in BY_NAME.values() if key.public]
    for section in part_table.SECTIONS:
        if row := part_table.row(section, config.get(section, {}).get("name", "")):
            public += [f"{section}.{option}" for option in row.public_options]
    return public


def settings(run: RunRecords) -> JsonObject:
    """The public part of a run's config, with its sections.

    If the data set is the user's own, its name is "folder" here and its path is left out.
    """
    stated: JsonObject = {}
    for name in public_keys(run.config):
        section, _, key = name.rpartition(".")
        values = run.config.get(section, {}) if section else run.config
        if section and section in run.config:
            stated.setdefault(section, {})
        if key in values and _is_plain(values[key]):
            (stated[section] if section else stated)[key] = values[key]
    stated["dataset"]["name"] = _public_name(run) or "folder"
    return stated


def data_in_words(run: RunRecords) -> str:
    """The public description of a run's data."""
    name = _public_name(run)
    return f"the data set `{name}`" if name else "a data set of its author's own"


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return bool(_PLAIN.fullmatch(value))
    if isinstance(value, list | tuple):
        return all(isinstance(number, int | float) for number in value)
    return isinstance(value, bool | int | float)


def _public_name(run: RunRecords) -> str:
    """Returns the name of a data set that bam knows.

    It returns "" for a user's own data set, whose name is part of a path.
    """
    # The summary has the data that were used, which a caller may have passed in.
    name = run.summary.get("dataset", "")
    return name if name in datasets.DATASETS and name == run.config["dataset"]["name"] else ""


def _describe_model(run: RunRecords) -> JsonObject:
    """Returns the contents of `model.json`, from which `load` builds the network.

    All of it is public. InputError if a release cannot describe a setting of the model.
    """
    section = run.config["model"]
    is_own = ":" in section["name"]
    public = public_keys(run.config)
    unknown = [
        k for k, v in section.items() if not (_is_plain(v) if is_own else f"model.{k}" in public)
    ]
    if unknown:
        raise InputError(
            f"a release cannot describe these settings of the model: {', '.join(unknown)}"
        )
    features = run.summary.get("features")
    has_digest = features in ("prior", "backbone")
    # Read again, because `run.summary` lacks line breaks and the like: names of classes stay exact.
    raw = json.loads((run.workdir / "summary.json").read_text())
    return {
        "model": section,
        "loss": run.config["loss"]["name"],
        "num_classes": run.summary["num_classes"],
        "classes": raw.get("classes") or [],
        "files": "turned upright by their EXIF, resized (Lanczos) until they cover `size`, height "
        "and width; of that the middle, in 1 (grey) or 3 (RGB) channels of 8 bits",
        "preprocessing": raw.get("preprocessing") or {},
        "image_shape": run.summary["image_shape"],
        **{x: run.summary[x] for x in ("raw_shape", "raw_dtype") if x in run.summary},
        "features": {
            k: v
            for k, v in run.config.get("features", {}).items()
            if f"features.{k}" in public and v is not None
        }
        | (run.summary.get("normalisation") or {} if features == "backbone" else {})
        | ({"digest": run.summary["features_digest"]} if has_digest else {}),
        "inputs": "(x / 255 - mean) / std of uint8 pixels x, (x - mean) / std of float features x; "
        "then scaled down to an L2 norm of at most input_clip_norm, unless that is 0",
        "mean": run.summary["mean"],
        "std": run.summary["std"],
        "input_clip_norm": run.config["input_clip_norm"],
        "precision": run.config["precision"],
    }


def _read_weights(run: RunRecords, like: Shapes) -> PyTree:
    """Reads the averaged weights after the last step and the frozen ones.

    LoRA's factors are merged into them.
    """
    newest = checkpoint.newest(run.workdir / CHECKPOINTS)
    if newest is None:
        raise InputError(
            f"the run in {run.workdir} kept no weights; train with --config.checkpoint.every "
            "above 0"
        )
    header, arrays = checkpoint.read(newest, lambda name: name.startswith(("averaged/", "frozen/")))
    taken = run.summary.get("steps_taken", run.plan.num_steps)
    # An earlier checkpoint, or one of another plan, does not have the weights of this statement.
    if header["step"] != taken or one_line(header["record"]) != run.plan_record:
        raise InputError(
            f"the newest checkpoint of {run.workdir} is not that of the run's last step"
        )
    leaves = {name.partition("/")[2]: jnp.asarray(array) for name, array in arrays}
    merged = lora.fold(traverse_util.unflatten_dict(leaves, sep="/"))
    leaves, names = traverse_util.flatten_dict(merged, sep="/"), pytree.names(like)
    if leaves.keys() != set(names):
        raise InputError(WRONG_WEIGHTS.format(newest))
    params = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in names])
    check_shapes(run.workdir, params, like)
    return params
