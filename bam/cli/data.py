"""Makes a data set from a folder of images, or shows one."""

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl.flags import FlagValues
from rich.progress import Progress

from bam import files, tables
from bam.cli import command, screen, signals
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing, Target
from bam.data.sources import parquet
from bam.errors import InputError
from bam.files import JsonObject
from bam.images import importing, leaks, listing, packed, persons, pixels, rows
from bam.privacy.user_ids import read_id
from bam.text import have, plural, short_list

VERBS = ("import", "show")
# Kind of labels -> loss; "": the loss of the config.
LOSSES = {"class": "", "several": "binary", "number": "squared_error"}
MOST_LINES = 5  # about files that are left out for one reason
MOST_LEFT_OUT = 0.1  # share of the images without a line about it
GROUP_SIZE = 4  # images of a user, in the printed command


def main(argv: Sequence[str]) -> int:
    """Runs `bam data` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("data", argv, data)


def data(flags: FlagValues, arguments: Sequence[str]) -> None:
    """Imports a folder or shows a data set, by the first argument."""
    if len(arguments) != 2 or arguments[0] not in VERBS:
        raise InputError("usage: bam data import FOLDER --out=DATA, or bam data show DATA")
    if arguments[0] == "import":
        import_folder(flags, Path(arguments[1]))
    else:
        show(Path(arguments[1]), flags.out)


def import_folder(flags: FlagValues, folder: Path) -> None:
    """Writes the data set of a folder or an archive, and prints how its images were used."""
    if not flags.out:
        raise InputError("--out is required: folder for the data set")
    if not packed.is_packed(folder):
        _import(flags, folder, screen.say)
        return
    screen.say(f"unpacking {folder} beside {flags.out}; the copy is removed at the end")
    is_outside = bool(flags.labels) and os.path.isfile(flags.labels)
    with signals.as_exceptions(), packed.unpack(folder, Path(flags.out), is_outside) as place:
        one_line = " ".join(str(place).split())  # errors join their lines, and so a path's spaces

        def with_archive(text: str) -> str:
            return text.replace(str(place), str(folder)).replace(one_line, str(folder))

        try:
            _import(flags, place, lambda *lines: screen.say(*map(with_archive, lines)))
        except (InputError, OSError) as error:
            raise DataError(with_archive(str(error))) from error


def _kind(flags: FlagValues) -> str:
    return "number" if flags.number else "several" if "," in flags.label_column else "class"


def _users_from(flags: FlagValues) -> str:
    """The source of users without a table, as for `listing.in_class_folders`."""
    return "folder" if flags.user_from else "file" if flags.user_column else ""


def _list_images(flags: FlagValues, folder: Path, log: rows.Log) -> listing.Listed:
    """Lists the images and their labels, from folders of classes or from a table."""
    if flags.labels:
        columns = {"file": flags.file_column, "label": flags.label_column}
        columns |= {"user": flags.user_column, "split": flags.split_column}
        listed = listing.in_table(
            folder,
            Path(flags.labels),
            {field: name for field, name in columns.items() if name},
            validation=flags.validation,
            log=log,
            may_lack="PatientID" if flags.user_column == "PatientID" else "",
            number=flags.number,
            use_masks=flags.masks,
            may_be_blank=any(x.startswith(":") for x in flags.map),
        )
    else:
        users = _users_from(flags)
        split, test = "train" * bool(flags.test_folder), Path(flags.test_folder)
        named = [*flags.classes, *(x.rpartition(":")[0] for x in flags.map)]
        options = {"users": users, "use_masks": flags.masks, "log": log, "named": named}
        listed = listing.in_class_folders(folder, flags.validation, split=split, **options)
        if flags.test_folder:
            more = listing.in_class_folders(test, split="test", **options)
            listed = listing.with_test(listed, more, folder, test, log)
    listed = importing.without_other_dicom(folder, listed, flags.all_dicom, log)
    separator = "," * (_kind(flags) == "several")
    return listed._replace(examples=_replace_labels(listed.examples, flags.map, separator, log))


def _replace_labels(
    examples: list[listing.Example], pairs: Sequence[str], separator: str, log: rows.Log
) -> list[listing.Example]:
    """Replaces labels by `pairs` of "FROM:TO".

    `separator` divides the labels of an image. If it is "", an image has one label.
    """
    replacements = dict[str, str]()
    for pair in pairs:
        old, _, new = pair.rpartition(":")
        if ":" not in pair or not new or old in replacements:
            raise InputError(
                f"--map={pair}: expected FROM:TO, each FROM once, as --map=yes:1,no:0, or :0 for "
                "blanks"
            )
        replacements[old] = new
    parts = lambda label: label.split(separator) if separator else [label]  # noqa: E731
    present = {part for x in examples for part in parts(x.label)}
    new_names = dict[str, str]()
    for old, new in sorted(replacements.items()):
        # "-1" of a command is the "-1.0" of a table: pandas writes whole numbers as floats.
        by_value = [x for x in present if _without_zeros(x) == _without_zeros(old)]
        labels = [old] if old in present else by_value
        for label in labels:
            if new_names.setdefault(label, new) != new:
                raise InputError(f"--map names the label {label} twice: name it once")
        if not labels:
            log(f"--map={old}:{new}: no image has the label {old} (NOT PRIVATE)")

    def new_name(label: str) -> str:
        return new_names.get(label, label)

    return [x._replace(label=separator.join(map(new_name, parts(x.label)))) for x in examples]


def _without_zeros(label: str) -> str:
    """Returns a whole number without zeros behind its point, "-1.0" as "-1"."""
    return re.sub(r"^([-+]?\d+)\.0*$", r"\1", label)


def _import(flags: FlagValues, folder: Path, log: Callable[..., None]) -> None:
    kind, preprocessing = _kind(flags), _preprocessing(flags)
    listed = _list_images(flags, folder, log)
    examples, num_listed = listed.examples, len(listed.examples)
    classes = flags.classes or sorted({x.label for x in examples}, key=_in_order)
    users = _users_from(flags)
    # Names of folders are published as those of classes; numbers are not.
    are_published = kind == "class" and not (flags.labels or flags.classes)
    if are_published:
        persons.check_number(folder, len(classes), num_listed, users)
        persons.check_names(folder, classes, users)
        persons.check_sides(folder, examples, users)
    if kind != "class":
        classes = flags.label_column.split(",") if kind == "several" else []
    if flags.user_column == "PatientID" and not examples[0].user:
        examples = _with_patients(folder, examples, flags.strict, log)
    if are_published:
        persons.check_each(folder, examples, users)
    if kind == "class" and not flags.classes:
        log(f"the names of the classes become public with the model: {short_list(classes)}")
    if flags.stratify:
        examples = importing.stratify(examples, flags.stratify)
    options = importing.Options(
        kind=kind,
        preprocessing=preprocessing,
        classes=tuple(classes),
        test_share=flags.test,
        strict=flags.strict,
    )
    out, workers = Path(flags.out), flags.workers or os.cpu_count() or 1

    def warn() -> None:
        with ThreadPoolExecutor(workers) as pool:
            log(*leaks.lines(folder, examples, options, flags.near_duplicates, pool))

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(plural(len(examples), "image"), total=None)
        on_shard = lambda ready, num: bar.update(task, completed=ready, total=num)  # noqa: E731
        manifest = importing.run(folder, examples, out, options, workers, on_shard, warn)
    if frames := manifest["first_frames"]:
        log(f"{have(frames, 'file')} several frames or pages: the first is used (NOT PRIVATE)")
    if num := manifest["unoriented"]:
        log(
            f"{have(num, 'NIfTI file')} no orientation (sform and qform code 0): used as "
            "stored, which may be turned or mirrored (NOT PRIVATE)"
        )
    log(*_lost(manifest), *_unused_lines(examples, options, manifest))
    log(*_left_out(manifest["left_out"], f"; {out / importing.MANIFEST} lists all"))
    if (share := len(manifest["left_out"]) / len(examples)) > MOST_LEFT_OUT:
        log(f"NOT PRIVATE: {share:.0%} of the images cannot be read: see why before you train")
    train, test = (manifest["num_examples"][split] for split in listing.SPLITS)
    log(
        f"{plural(listed.num_images, 'image')}: {train:,} to train, {test:,} to test, "
        f"{num_listed - train - test:,} left out"
        + "".join(f", {num:,} {reason}" for reason, num in listed.unused.items())
        + {"class": f"; {len(classes)} classes", "several": f"; {len(classes)} labels each"}.get(
            kind, "; labels are numbers"
        ),
        f"train on them: {_command(out, manifest, kind)}",
    )


def _left_out(reasons: dict[str, str], more: str = "") -> list[str]:
    """Lines about the files that were not read: one a file, or one a reason of many files.

    `more` says at the end of the latter where all names are.
    """
    by_reason = dict[str, list[str]]()
    for file, reason in reasons.items():
        reader = listing.READ_BY.get(listing.suffix_of(file), "")
        why = f"{reason.rpartition(': ')[2]}{reader and '; '}{reader}"
        by_reason.setdefault(why, []).append(file)
    lines = []
    for why, names in by_reason.items():
        if len(names) <= MOST_LINES:
            lines += [f"left out: {file} ({why})" for file in names]
        else:
            lines.append(f"left out: {len(names):,} files, as {names[0]} ({why}){more}")
    return lines


def _in_order(name: str) -> tuple[bool, int, str]:
    """A sort key that puts numbers first, by value, and then other names: 2, 10, x."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name


def _unused_lines(
    examples: Sequence[listing.Example], options: importing.Options, manifest: JsonObject
) -> list[str]:
    """Returns a line about the images that the printed command leaves unused, or no line."""
    trained = [x for x in examples if importing.split_of(x, options.test_share) == "train"]
    images = Counter(x.user for x in trained if x.user and x.file not in manifest["left_out"])
    num = sum(max(0, x - GROUP_SIZE) for x in images.values())
    return [
        f"NOT PRIVATE: group_size={GROUP_SIZE}, in the command below, leaves {num:,} of "
        f"{images.total():,} training images unused: take instead the most images of a person by "
        "your study's protocol"
    ] * (num > 0)


def _lost(manifest: JsonObject) -> list[str]:
    """Lines about pictures that may have lost their content, as those of one colour."""
    lines = [
        f"NOT PRIVATE: {num:,} of the pictures are {kind}" for kind, num in manifest["lost"].items()
    ]
    if ends := manifest["lost_numbers"]:
        low, high = pixels.window_around(*ends)
        window = ",".join(f"{x:g}" for x in manifest["preprocessing"]["window"])
        lines.append(
            f"NOT PRIVATE: numbers in the pictures of one colour lie between {low:.12g} and "
            f"{high:.12g}, and --window={window} shows no difference in any of them: give the "
            "window of the device that made the files"
        )
    return lines


def _command(out: Path, manifest: JsonObject, kind: str) -> str:
    """Returns a shell command that trains on a data set.

    `configs/folder.py` reads all other facts from the data set.
    """
    values = {"dataset.path": str(out), "loss.name": LOSSES[kind]}
    if manifest["ids"]:
        # A constant, because the largest number of images of a user is private.
        values |= {"dataset.groups": "user", "dataset.group_size": str(GROUP_SIZE)}
    num_units = manifest["num_users"] or manifest["num_examples"]["train"]
    if num_units > 10_000:  # δ should be at most a tenth of 1/N, and 1e-5, the default, is not
        values["delta"] = f"1e-{len(str(num_units)) + 1}"
    overrides = [f"--config.{key}={value}" for key, value in values.items() if value]
    return shlex.join(["bam", "train", "--config=folder:dp_sgd", "--workdir=run", *overrides])


def _preprocessing(flags: FlagValues) -> Preprocessing:
    """Reads from the flags how files become pixels.

    Raises InputError for a size or a window that is not numbers.
    """
    try:
        sides = [int(x) for x in flags.size.lower().split("x")]
    except ValueError:
        raise InputError(
            f"--size={flags.size} is not a number of pixels: write --size=32 or --size=16x24"
        ) from None
    try:
        window: Any = flags.window and tuple(float(x) for x in flags.window)
    except ValueError:
        raise InputError(
            f"--window={','.join(flags.window)} is not two numbers: write --window=LOW,HIGH"
        ) from None
    size: Any = tuple(sides * 2 if len(sides) == 1 else sides)
    target = (flags.target_offset, flags.target_scale)
    preprocessing = Preprocessing(
        size,
        int(flags.channels),
        window,
        flags.background,
        target if flags.number and target != (0, 1) else None,
    )
    preprocessing.check()
    return preprocessing


def _with_patients(
    folder: Path, examples: Sequence[listing.Example], strict: bool, log: Callable[..., None]
) -> list[listing.Example]:
    """Returns the examples with the PatientID of their DICOM file as user.

    Leaves out the examples whose file has none, or raises DataError for them if `strict`. Also
    raises DataError for a PatientID that has two issuers. As a rule, these are two hospitals that
    use the same numbers.
    """
    with_user, left_out, issuers = [], dict[str, str](), dict[str, str]()
    for example in examples:
        try:
            written, issuer = pixels.dicom_user(folder / example.file)
        except DataError as error:
            if strict:
                raise
            left_out[example.file] = str(error)
            continue
        user = read_id(written, str(folder / example.file))
        if issuer and (other := issuers.setdefault(user, issuer)) != issuer:
            raise DataError(
                f"{folder / example.file}: PatientID {written!r} has the issuer {issuer!r} here "
                f"and {other!r} in another file, so it may name two persons: give a table of the "
                "files with --labels=TABLE, and its column of persons with --user_column=COLUMN"
            )
        with_user.append(example._replace(user=user, written=written))
    if not with_user:
        raise DataError(f"{folder}: no DICOM file with a PatientID: leave out --user_column")
    log(*_left_out(left_out))
    return with_user


def show(data: Path, out: str) -> None:
    """Prints the public facts of a data set, then the private ones.

    Draws images to the file `out`.
    """
    manifest = importing.read_manifest(data)
    shape = " × ".join(str(size) for size in manifest["shape"])
    train, test, _ = parquet.read(data, stays=lambda num_bytes: True)
    names, left_out = manifest["classes"], len(manifest["left_out"])
    target = Target(*(manifest["preprocessing"].get("target") or ()))
    labels = [np.asarray(split.labels) for split in (train, test)]  # [n], or [n, labels]
    kind = f"{len(names)} {'labels' if labels[0].ndim == 2 else 'classes'}" if names else "numbers"
    screen.say(
        f"{plural(len(train.labels), 'image')} to train, {len(test.labels):,} to test, "
        f"{shape}; {kind}; "
        f"{plural(left_out, 'file')} left out"
    )
    if names:
        counts = [x.sum(0) if x.ndim == 2 else np.bincount(x, minlength=len(names)) for x in labels]
        rows = [[str(x) for x in row] for row in zip(names, *counts, strict=True)]
        screen.table(tables.text("class", "train", "test"), rows)
    else:
        _show_numbers(target, labels)
    screen.say("counts of private labels are NOT PRIVATE: do not publish them")
    if manifest["ids"]:
        sizes = np.unique(parquet.read_ids(data, manifest["ids"]), return_counts=True)[1]
        each = f"{sizes.min()} to {sizes.max()} images each, median {np.median(sizes):g}"
        if sizes.min() == sizes.max():
            each = f"{plural(sizes[0], 'image')} each"
        screen.say(f"{len(sizes):,} users to train, {each}: NOT PRIVATE, as are the images below")
    if out:
        from bam.images import sheet  # it needs the extra `plots`

        files.check_writable(out)
        sheet.draw(train, manifest["classes"], Path(out), target)
        screen.say(f"{out} shows private images: do not publish it")


def _show_numbers(target: Target, labels: Sequence[np.ndarray]) -> None:
    """Prints quantiles of labels that are numbers, in the units of the files."""
    rows, digits = [], target.digits(4)
    for split, values in zip(listing.SPLITS, labels, strict=True):
        shares = np.quantile(target.in_units(values), (0, 0.25, 0.5, 0.75, 1))
        rows.append([split, *(f"{x:.{digits}g}" for x in shares)])
    screen.table(tables.text("numbers", "least", "a quarter", "median", "3 quarters", "most"), rows)
