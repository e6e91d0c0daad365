"""Makes a data set of a folder of images, and shows one."""

import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.progress import Progress

from bam import tables
from bam.cli import console, screen
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.data.sources import parquet
from bam.errors import InputError
from bam.files import JsonObject
from bam.images import importing, leaks, listing, pixels

VERBS = ("import", "show")
# Of kinds of labels; "": the config's own.
LOSSES = {"class": "", "several": "binary", "number": "squared_error"}
GROUP_SIZE = 4  # images of a user, in the command that is printed


def main(argv: Sequence[str]) -> int:
    """`bam data` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("data", argv, data)


def data(given: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Imports, or shows."""
    if len(arguments) != 2 or arguments[0] not in VERBS:
        raise InputError("bam data import FOLDER --out=DATA, or bam data show DATA")
    if arguments[0] == "import":
        import_folder(given, Path(arguments[1]))
    else:
        show(Path(arguments[1]), given.out)


def import_folder(given: flags.FlagValues, folder: Path) -> None:
    """Writes the data set, and says what became of the images."""
    if not given.out:
        raise InputError("--out is required: folder for the data set")
    preprocessing = _preprocessing(given)
    several = given.label_column.split(",")[1:] != []
    kind = "number" if given.number else "several" if several else "class"
    if given.labels and given.user_from:
        raise InputError("--user_from is for folders of classes: give --user_column with --labels")
    if (given.user_column not in ("", "PatientID") or given.split_column) and not given.labels:
        raise InputError(
            "--user_column and --split_column are columns of --labels, which is missing"
        )
    if given.labels:
        if not (given.classes or several or given.number):
            raise InputError("--labels needs --classes: their names are public, the labels are not")
        named = {"file": given.file_column, "label": given.label_column}
        named |= {"user": given.user_column, "split": given.split_column}
        columns = {field: name for field, name in named.items() if name}
        listed = listing.in_table(
            folder,
            Path(given.labels),
            columns,
            validation=given.validation,
            log=console.say,
            may_lack="PatientID" if given.user_column == "PatientID" else "",
        )
    else:
        users = "folder" if given.user_from else "file" if given.user_column else ""
        listed = listing.in_class_folders(
            folder, given.validation, users, given.masks, log=console.say
        )
    examples = listed.examples
    classes, num_listed = given.classes or sorted({x.label for x in examples}), len(examples)
    if kind != "class":
        classes = given.label_column.split(",") if several else []
    if given.user_column == "PatientID" and not examples[0].user:
        examples = _with_patients(folder, examples, given.strict)
    options = importing.Options(
        kind=kind,
        preprocessing=preprocessing,
        classes=tuple(classes),
        test_share=given.test,
        strict=given.strict,
    )
    out, workers = Path(given.out), given.workers or os.cpu_count() or 1

    def warn() -> None:
        with ThreadPoolExecutor(workers) as pool:
            console.say(*leaks.lines(folder, examples, options, given.near_duplicates, pool))

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(f"{len(examples):,} images", total=None)
        on_shard = lambda done, num: bar.update(task, completed=done, total=num)  # noqa: E731
        manifest = importing.run(folder, examples, out, options, workers, on_shard, warn)
    if frames := manifest["first_frames"]:
        console.say(
            f"{frames:,} files have several frames or pages: the first is used (NOT PRIVATE)"
        )
    console.say(*_lost(manifest))
    for file, why in manifest["left_out"].items():
        reader = listing.READ_BY.get(listing.suffix_of(file), "")
        console.say(f"left out: {file} ({why.rpartition(': ')[2]}{reader and '; '}{reader})")
    train, test = (manifest["num_examples"][split] for split in listing.SPLITS)
    console.say(
        f"{listed.num_images:,} images: {train:,} to train, {test:,} to test, "
        f"{num_listed - train - test:,} left out"
        + "".join(f", {num:,} {why}" for why, num in listed.unused.items())
        + {"class": f"; {len(classes)} classes", "several": f"; {len(classes)} labels each"}.get(
            kind, "; labels are numbers"
        ),
        f"train on them: {_command(out, manifest, kind)}",
    )


def _lost(manifest: JsonObject) -> list[str]:
    """Lines about pictures that may have lost what they showed."""
    lines = [
        f"NOT PRIVATE: {num:,} of the pictures are {kind}" for kind, num in manifest["lost"].items()
    ]
    if ends := manifest["lost_numbers"]:
        low, high = ends
        window = ",".join(f"{x:g}" for x in manifest["preprocessing"]["window"])
        lines.append(
            f"NOT PRIVATE: numbers of those of one colour go from {low:.6g} to {high:.6g}; "
            f"--window={window} shows none of them: give that of the device that made the files"
        )
    return lines


def _command(out: Path, manifest: JsonObject, kind: str) -> str:
    """What trains on a data set, for a shell; `configs/folder.py` does the rest."""
    values = {"dataset.path": str(out), "loss.name": LOSSES[kind]}
    if manifest["ids"]:
        # A constant: the largest number of images that a user has is private.
        values |= {"dataset.groups": "user", "dataset.group_size": str(GROUP_SIZE)}
    num_units = manifest["num_users"] or manifest["num_examples"]["train"]
    if num_units >= 50_000:  # of which 1e-5 is not far below 1/N
        values["delta"] = f"1e-{len(str(num_units)) + 1}"
    given = [f"--config.{key}={value}" for key, value in values.items() if value]
    return shlex.join(["bam", "train", "--config=folder:dp_sgd", "--workdir=run", *given])


def _preprocessing(given: flags.FlagValues) -> Preprocessing:
    """What the flags say of pixels; an InputError if they are no numbers."""
    try:
        sides = [int(x) for x in given.size.lower().split("x")]
        window: Any = given.window and tuple(float(x) for x in given.window)
    except ValueError:
        raise InputError("--size=32 or --size=16x24, and --window=LOW,HIGH, are numbers") from None
    size: Any = tuple(sides * 2 if len(sides) == 1 else sides)
    preprocessing = Preprocessing(size, int(given.channels), window, given.background)
    preprocessing.check()
    return preprocessing


def _with_patients(
    folder: Path, examples: Sequence[listing.Example], strict: bool
) -> list[listing.Example]:
    """Examples whose user is the PatientID of their DICOM file; the others are left out."""
    known, left_out = [], []
    for example in examples:
        try:
            known.append(example._replace(user=pixels.dicom_user(folder / example.file)))
        except DataError as error:
            if strict:
                raise
            left_out.append(f"left out: {example.file} ({str(error).rpartition(': ')[2]})")
    if not known:
        raise DataError(f"{folder}: no DICOM file with a PatientID")
    console.say(*left_out)
    return known


def show(data: Path, out: str) -> None:
    """Prints what is public of a data set, then what is not; draws some images with --out."""
    manifest = importing.read_manifest(data)
    shape = " × ".join(str(size) for size in manifest["shape"])
    train, test, _ = parquet.read(data, stays=lambda num_bytes: True)
    names = manifest["classes"]
    console.say(
        f"{len(train.labels):,} images to train, {len(test.labels):,} to test, {shape}; "
        f"{len(names)} classes; {len(manifest['left_out'])} files left out"
    )
    if names:
        labels = [np.asarray(split.labels) for split in (train, test)]  # [n], or [n, several]
        counts = [x.sum(0) if x.ndim == 2 else np.bincount(x, minlength=len(names)) for x in labels]
        rows = [[str(x) for x in row] for row in zip(names, *counts, strict=True)]
        screen.show(tables.text("class", "train", "test"), rows)
    console.say("counts of private labels are NOT PRIVATE: do not publish them")
    if manifest["ids"]:
        sizes = np.unique(parquet.read_ids(data, manifest["ids"]), return_counts=True)[1]
        console.say(
            f"{len(sizes):,} users to train, {sizes.min()} to {sizes.max()} images each, median "
            f"{np.median(sizes):g}: NOT PRIVATE, as are the images below"
        )
    if out:
        from bam.images import sheet  # which needs the extra `plots`

        console.check_writable(out)
        sheet.draw(train, manifest["classes"], Path(out))
        console.say(f"{out}: images of persons, not to be published")
