"""Makes a data set of a folder of images, and shows one."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.progress import Progress

from bam import files, tables
from bam.cli import console, screen
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing, Target
from bam.data.sources import parquet
from bam.errors import InputError
from bam.files import JsonObject
from bam.images import importing, leaks, listing, packed, pixels, rows

VERBS = ("import", "show")
# Of kinds of labels; "": the config's own.
LOSSES = {"class": "", "several": "binary", "number": "squared_error"}
MANY, FEW = 10, 5  # so many folders of fewer images each, on average, may be persons
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
    """Writes the data set of a folder or an archive, and says what became of the images."""
    if not given.out:
        raise InputError("--out is required: folder for the data set")
    if not packed.is_packed(folder):
        _import(given, folder, console.say)
        return
    console.say(f"unpacking {folder} beside {given.out}; the copy is removed at the end")
    is_outside = bool(given.labels) and os.path.isfile(given.labels)
    with console.clearing(), packed.unpacked(folder, Path(given.out), is_outside) as place:
        one_line = " ".join(str(place).split())  # as errors have it
        named = lambda text: text.replace(str(place), str(folder)).replace(  # noqa: E731
            one_line, str(folder)
        )
        try:
            _import(given, place, lambda *lines: console.say(*map(named, lines)))
        except (InputError, OSError) as error:
            raise DataError(named(str(error))) from error


def _kind(given: flags.FlagValues) -> str:
    return "number" if given.number else "several" if "," in given.label_column else "class"


def _listed(given: flags.FlagValues, folder: Path, log: rows.Log) -> listing.Listed:
    """The images and their labels, of folders or of a table."""
    if given.labels:
        named = {"file": given.file_column, "label": given.label_column}
        named |= {"user": given.user_column, "split": given.split_column}
        listed = listing.in_table(
            folder,
            Path(given.labels),
            {field: name for field, name in named.items() if name},
            validation=given.validation,
            log=log,
            may_lack="PatientID" if given.user_column == "PatientID" else "",
            number=given.number,
        )
    else:
        users = "folder" if given.user_from else "file" if given.user_column else ""
        split, test = "train" * bool(given.test_folder), Path(given.test_folder)
        listed = listing.in_class_folders(folder, given.validation, users, given.masks, log, split)
        if given.test_folder:
            more = listing.in_class_folders(test, "", users, given.masks, log, "test")
            listed = listing.with_test(listed, more, folder, test, log)
    separator = "," * (_kind(given) == "several")
    return listed._replace(examples=_mapped(listed.examples, given.map, separator, log))


def _mapped(
    examples: list[listing.Example], pairs: Sequence[str], separator: str, log: rows.Log
) -> list[listing.Example]:
    """Examples with labels in the place of others, by "FROM:TO"; `separator`: of several labels."""
    into = dict[str, str]()
    for pair in pairs:
        old, _, new = pair.rpartition(":")
        if not (old and new) or old in into:
            raise InputError(f"--map={pair}: expected FROM:TO, each FROM once, as --map=yes:1,no:0")
        into[old] = new
    parts = lambda label: label.split(separator) if separator else [label]  # noqa: E731
    present = {part for x in examples for part in parts(x.label)}
    for label in sorted(into.keys() - present):
        log(f"--map={label}:{into[label]}: no image has the label {label} (NOT PRIVATE)")
    return [
        x._replace(label=separator.join(into.get(part, part) for part in parts(x.label)))
        for x in examples
    ]


def _import(given: flags.FlagValues, folder: Path, log: Callable[..., None]) -> None:
    kind, preprocessing = _kind(given), _preprocessing(given)
    listed = _listed(given, folder, log)
    examples, num_listed = listed.examples, len(listed.examples)
    classes = given.classes or sorted({x.label for x in examples}, key=_in_order)
    if not given.labels and not given.classes:
        _check_persons(folder, len(classes), num_listed)
    if kind != "class":
        classes = given.label_column.split(",") if kind == "several" else []
    if given.user_column == "PatientID" and not examples[0].user:
        examples = _with_patients(folder, examples, given.strict, log)
    if given.stratify:
        examples = importing.stratified(examples, given.stratify)
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
            log(*leaks.lines(folder, examples, options, given.near_duplicates, pool))

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(files.counted(len(examples), "image"), total=None)
        on_shard = lambda done, num: bar.update(task, completed=done, total=num)  # noqa: E731
        manifest = importing.run(folder, examples, out, options, workers, on_shard, warn)
    if frames := manifest["first_frames"]:
        log(
            f"{files.have(frames, 'file')} several frames or pages: the first is used (NOT PRIVATE)"
        )
    log(*_lost(manifest))
    for file, why in manifest["left_out"].items():
        reader = listing.READ_BY.get(listing.suffix_of(file), "")
        log(f"left out: {file} ({why.rpartition(': ')[2]}{reader and '; '}{reader})")
    train, test = (manifest["num_examples"][split] for split in listing.SPLITS)
    log(
        f"{files.counted(listed.num_images, 'image')}: {train:,} to train, {test:,} to test, "
        f"{num_listed - train - test:,} left out"
        + "".join(f", {num:,} {why}" for why, num in listed.unused.items())
        + {"class": f"; {len(classes)} classes", "several": f"; {len(classes)} labels each"}.get(
            kind, "; labels are numbers"
        ),
        f"train on them: {_command(out, manifest, kind)}",
    )


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers as numbers, then texts: 2, 10, x."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name


def _check_persons(folder: Path, num_classes: int, num_images: int) -> None:
    """InputError for folders that may be persons: their names would be published as classes."""
    if num_classes >= MANY and num_images < FEW * num_classes:
        raise InputError(
            f"{folder}: {num_classes:,} folders with {num_images:,} images: are they persons? "
            "Names of classes are public. For persons make FOLDER/CLASS/PERSON/… and give "
            "--user_from=folder; if they are the classes, name them with --classes=A,B,…"
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
    target = (given.target_offset, given.target_scale)
    preprocessing = Preprocessing(
        size,
        int(given.channels),
        window,
        given.background,
        target if given.number and target != (0, 1) else None,
    )
    preprocessing.check()
    return preprocessing


def _with_patients(
    folder: Path, examples: Sequence[listing.Example], strict: bool, log: Callable[..., None]
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
    log(*left_out)
    return known


def show(data: Path, out: str) -> None:
    """Prints what is public of a data set, then what is not; draws some images with --out."""
    manifest = importing.read_manifest(data)
    shape = " × ".join(str(size) for size in manifest["shape"])
    train, test, _ = parquet.read(data, stays=lambda num_bytes: True)
    names, left_out = manifest["classes"], len(manifest["left_out"])
    target = Target(*(manifest["preprocessing"].get("target") or ()))
    labels = [np.asarray(split.labels) for split in (train, test)]  # [n], or [n, several]
    kind = f"{len(names)} {'labels' if labels[0].ndim == 2 else 'classes'}" if names else "numbers"
    console.say(
        f"{files.counted(len(train.labels), 'image')} to train, {len(test.labels):,} to test, "
        f"{shape}; {kind}; "
        f"{files.counted(left_out, 'file')} left out"
    )
    if names:
        counts = [x.sum(0) if x.ndim == 2 else np.bincount(x, minlength=len(names)) for x in labels]
        rows = [[str(x) for x in row] for row in zip(names, *counts, strict=True)]
        screen.show(tables.text("class", "train", "test"), rows)
    else:
        _show_numbers(target, labels)
    console.say("counts of private labels are NOT PRIVATE: do not publish them")
    if manifest["ids"]:
        sizes = np.unique(parquet.read_ids(data, manifest["ids"]), return_counts=True)[1]
        each = f"{sizes.min()} to {sizes.max()} images each, median {np.median(sizes):g}"
        if sizes.min() == sizes.max():
            each = f"{files.counted(sizes[0], 'image')} each"
        console.say(f"{len(sizes):,} users to train, {each}: NOT PRIVATE, as are the images below")
    if out:
        from bam.images import sheet  # which needs the extra `plots`

        console.check_writable(out)
        sheet.draw(train, manifest["classes"], Path(out), target)
        console.say(f"{out}: images of persons, not to be published")


def _show_numbers(target: Target, labels: Sequence[np.ndarray]) -> None:
    """Prints where labels that are numbers lie, in the units of the files."""
    rows, digits = [], target.digits(4)
    for split, values in zip(listing.SPLITS, labels, strict=True):
        shares = np.quantile(target.in_units(values), (0, 0.25, 0.5, 0.75, 1))
        rows.append([split, *(f"{x:.{digits}g}" for x in shares)])
    screen.show(tables.text("numbers", "least", "a quarter", "median", "3 quarters", "most"), rows)
