"""Makes a data set of a folder of images, and shows one.

bam data import photographs --out=data --size=32
bam data import scans --out=data --size=64 --channels=1 --labels=scans.csv --classes=ill,well \
  --file_column=file --label_column=diagnosis --user_column=patient
bam data show data --out=sheet.png

`import` reads FOLDER/CLASS/… or FOLDER/train/CLASS/… and FOLDER/test/CLASS/…, or the images that
--labels names: PNG, JPEG, TIFF, WebP, BMP, GIF, JPEG 2000, AVIF and .npy of any sizes, and with the
extras dicom, heic and nifti those. Files of more than 8 bits may need a --window. It goes on where
it was stopped. Train on it with --config.dataset.name=folder --config.dataset.path=DATA, and with
--config.dataset.groups=user to protect users. The names of the classes are public.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.progress import Progress

from bam import files
from bam.cli import console, tables
from bam.data import importing, leaks, listing, pixels
from bam.data.common import DataError, Split
from bam.data.sources import parquet
from bam.errors import InputError

_OUT = flags.DEFINE_string("out", "", "of import: folder for the data set; of show: a PNG file")
_SIZE = flags.DEFINE_string("size", "32", "pixels of the height and the width; 16x24: of each")
_CHANNELS = flags.DEFINE_enum("channels", "3", ["1", "3"], "1: grey; 3: colour")
_WINDOW = flags.DEFINE_list(
    "window", None, "LOW,HIGH: numbers that are black and white, in files of more than 8 bits"
)
_BACKGROUND = flags.DEFINE_enum("background", "white", pixels.BACKGROUNDS, "of transparent pixels")
_LABELS = flags.DEFINE_string("labels", "", "CSV or Parquet file with a row for each image")
_FILE = flags.DEFINE_string("file_column", "file", "of --labels: path of the image in FOLDER")
_LABEL = flags.DEFINE_string(
    "label_column", "label", "of --labels: name of the class; several columns: zeros and ones"
)
_USER = flags.DEFINE_string("user_column", "", "of --labels: whose image it is; '': not known")
_SPLIT = flags.DEFINE_string("split_column", "", "of --labels: train or test; '': drawn by hash")
_NUMBER = flags.DEFINE_bool("number", False, "labels are numbers, not names of classes")
_USERS = flags.DEFINE_enum(
    "user_from", "", ["", "folder"], "folder: that between a class and an image names its user"
)
_VALIDATION = flags.DEFINE_enum(
    "validation", "", ["", "train", "test", "leave"],
    "where validation images go; '': to training, or to the test where there is none",
)  # fmt: skip
_NEAR = flags.DEFINE_bool("near_duplicates", False, "count pictures that look alike, too")
_CLASSES = flags.DEFINE_list("classes", "", "public names of the classes; '': the folders' names")
_TEST = flags.DEFINE_float("test", 0.2, "share of users, or of images, for the test split", 0, 1)
_STRICT = flags.DEFINE_bool("strict", False, "refuse a file that cannot be read; else leave it out")
_WORKERS = flags.DEFINE_integer("workers", 0, "threads that decode; 0: one for each core", 0)

VERBS = ("import", "show")


def main(arguments: Sequence[str]) -> None:
    """Imports, or shows."""
    with console.one_line_errors():
        if len(arguments) != 2 or arguments[0] not in VERBS:
            raise InputError("bam data import FOLDER --out=DATA, or bam data show DATA")
        (import_folder if arguments[0] == "import" else show)(Path(arguments[1]))


def import_folder(folder: Path) -> None:
    """Writes the data set, and says what became of the images."""
    if not _OUT.value:
        raise InputError("--out is required: folder for the data set")
    preprocessing = _preprocessing()
    several = _LABEL.value.split(",")[1:] != []
    kind = "number" if _NUMBER.value else "several" if several else "class"
    if _LABELS.value and _USERS.value:
        raise InputError("--user_from is for folders of classes: give --user_column with --labels")
    if (_USER.value not in ("", "PatientID") or _SPLIT.value) and not _LABELS.value:
        raise InputError(
            "--user_column and --split_column are columns of --labels, which is missing"
        )
    if _LABELS.value:
        if not (_CLASSES.value or several or _NUMBER.value):
            raise InputError("--labels needs --classes: their names are public, the labels are not")
        named = {"file": _FILE.value, "label": _LABEL.value}
        named |= {"user": _USER.value, "split": _SPLIT.value}
        columns = {field: name for field, name in named.items() if name}
        examples = listing.in_table(
            folder,
            Path(_LABELS.value),
            columns,
            validation=_VALIDATION.value,
            log=console.say,
            may_lack="PatientID" if _USER.value == "PatientID" else "",
        )
    else:
        users = _USERS.value == "folder"
        examples = listing.in_class_folders(folder, _VALIDATION.value, users, log=console.say)
    classes, num_listed = _CLASSES.value or sorted({x.label for x in examples}), len(examples)
    if kind != "class":
        classes = _LABEL.value.split(",") if several else []
    if _USER.value == "PatientID" and not examples[0].user:
        examples = _with_patients(folder, examples)
    options = importing.Options(
        kind=kind,
        preprocessing=preprocessing,
        classes=tuple(classes),
        test_share=_TEST.value,
        strict=_STRICT.value,
    )
    out, workers = Path(_OUT.value), _WORKERS.value or os.cpu_count() or 1

    def warn() -> None:
        with ThreadPoolExecutor(workers) as pool:
            console.say(*leaks.lines(folder, examples, options, _NEAR.value, pool))

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(f"{len(examples):,} images", total=None)
        on_shard = lambda done, num: bar.update(task, completed=done, total=num)  # noqa: E731
        manifest = importing.run(folder, examples, out, options, workers, on_shard, warn)
    if frames := manifest["first_frames"]:
        console.say(
            f"{frames:,} files have several frames or pages: the first is used (NOT PRIVATE)"
        )
    for file, why in manifest["left_out"].items():
        reader = listing.READ_BY.get(listing.suffix_of(file), "")
        console.say(f"left out: {file} ({why.rpartition(': ')[2]}{reader and '; '}{reader})")
    train, test = (manifest["num_examples"][split] for split in listing.SPLITS)
    console.say(
        f"{train:,} images to train and {test:,} to test on, {num_listed - train - test} left out; "
        f"{len(options.classes)} classes",
        f"train on them: --config.dataset.name=folder --config.dataset.path={out}"
        + (" --config.dataset.groups=user" if manifest["ids"] else "")
        + {
            "several": " --config.loss.name=binary",
            "number": " --config.loss.name=squared_error",
        }.get(kind, ""),
    )


def _preprocessing() -> pixels.Preprocessing:
    """What the flags say of pixels; an InputError if they are no numbers."""
    try:
        sides = [int(x) for x in _SIZE.value.lower().split("x")]
        window: Any = _WINDOW.value and tuple(float(x) for x in _WINDOW.value)
    except ValueError:
        raise InputError("--size=32 or --size=16x24, and --window=LOW,HIGH, are numbers") from None
    size: Any = tuple(sides * 2 if len(sides) == 1 else sides)
    preprocessing = pixels.Preprocessing(size, int(_CHANNELS.value), window, _BACKGROUND.value)
    preprocessing.check()
    return preprocessing


def _with_patients(folder: Path, examples: Sequence[listing.Example]) -> list[listing.Example]:
    """Examples whose user is the PatientID of their DICOM file; the others are left out."""
    known, left_out = [], []
    for example in examples:
        try:
            known.append(example._replace(user=pixels.dicom_user(folder / example.file)))
        except DataError as error:
            if _STRICT.value:
                raise
            left_out.append(f"left out: {example.file} ({str(error).rpartition(': ')[2]})")
    if not known:
        raise DataError(f"{folder}: no DICOM file with a PatientID")
    console.say(*left_out)
    return known


def show(data: Path) -> None:
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
        tables.show(tables.text("class", "train", "test"), rows)
    console.say("counts of private labels are NOT PRIVATE: do not publish them")
    if manifest["ids"]:
        sizes = np.unique(parquet.read_ids(data, manifest["ids"]), return_counts=True)[1]
        console.say(
            f"{len(sizes):,} users to train, 1 to {sizes.max()} images each, half of them "
            f"{np.median(sizes):.0f} or fewer: NOT PRIVATE, as are the images below"
        )
    if _OUT.value:
        console.check_writable(_OUT.value)
        _draw(train, manifest["classes"], Path(_OUT.value))
        console.say(f"{_OUT.value}: images of persons, not to be published")


def _draw(split: Split, classes: Sequence[str], path: Path) -> None:
    """A contact sheet: a row of up to eight images of each of the first twelve classes."""
    from bam.sweep import plot

    images, labels = split.images, np.asarray(split.labels)
    is_of = labels.T == 1 if labels.ndim == 2 else [labels == k for k in range(len(classes))]
    chosen = [np.flatnonzero(x)[:8] for x in is_of][:12] or [np.arange(min(8, len(labels)))]
    figure, axes = plot.plt.subplots(
        len(chosen), 8, figsize=(7, 0.95 * len(chosen) + 0.2), squeeze=False, layout="constrained"
    )
    for number, (row, line) in enumerate(zip(chosen, axes, strict=True)):
        line[0].set_title(files.drawn(classes[number]) if classes else "", fontsize=9, loc="left")
        for axis in line:
            axis.set_axis_off()
        for axis, index in zip(line, row, strict=False):
            axis.imshow(images[[index]][0].squeeze(), cmap="gray", vmin=0, vmax=255)
    plot.save(figure, path)


if __name__ == "__main__":
    console.run(main, positional=True)
