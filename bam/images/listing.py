"""Lists the images of a folder with their labels, from folders of classes or from a table."""

import collections
import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bam.data.common import DataError
from bam.errors import InputError
from bam.images import masks, rows
from bam.privacy.user_ids import is_missing, read_id, user_id
from bam.text import one_line, plural, short_list, visible

SUFFIXES = (  # from .dcm on they need packages of extras
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".jp2",
    ".j2k", ".avif", ".npy", ".dcm", ".dicom", ".ima", ".heic", ".heif", ".nii", ".nii.gz",
)  # fmt: skip
# Suffix of a file that bam does not read -> a remedy.
READ_BY = {
    **dict.fromkeys((".psd", ".svg", ".ai", ".eps", ".raw", ".dng"), "save them as PNG"),
    **dict.fromkeys((".npz", ".mat", ".h5"), "save their arrays as .npy"),
    **dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"), "unpack them"),
    "no suffix": "DICOM often has none: name them .dcm",
}
SPLITS = ("train", "test")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
ZEROS_AND_ONES = {"True": "1", "False": "0", "1.0": "1", "0.0": "0"}
# Files that systems and programs leave in folders, besides names that begin with a dot.
JUNK = {
    "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "icon\r",
    "system volume information", "lost+found", "__pycache__",
}  # fmt: skip
_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # as Hugging Face names them

MORE_NAMES = "more names of one file"

Counts: TypeAlias = collections.Counter[str]


class Example(NamedTuple):
    """One image: its path relative to the folder, its label, user and split.

    A label is the name of a class, a number, or zeros and ones for several labels, as in "0,1,1".
    `user` and `split` are "" if neither a folder nor a table names them. `user` is a `user_id`, and
    `written` the text that it was read from. `row` is the row of the table, counted as in a
    spreadsheet; 0 without a table.
    """

    file: str
    label: str
    user: str = ""
    split: str = ""
    row: int = 0
    written: str = ""

    @property
    def place(self) -> str:
        """The name of the example in an error."""
        return f"row {self.row}: {self.file}" if self.row else self.file


class Listed(NamedTuple):
    """The images to use, and the number of the others.

    Attributes:
      examples: each image once.
      num_images: number of image files in the folder or in the table, used or not.
      unused: reason -> number of images that are not used for it.
    """

    examples: list[Example]
    num_images: int
    unused: Counts


def in_class_folders(
    folder: Path,
    validation: str = "",
    users: str = "",
    use_masks: bool = False,
    log: rows.Log = lambda line: None,
    split: str = "",
    named: Sequence[str] = (),
) -> Listed:
    """The images of FOLDER/CLASS/…, or of FOLDER/train/CLASS/… and FOLDER/test/CLASS/….

    Args:
      folder: the folder.
      validation: where images of a validation split go: "train", "test" or "leave" (out). "": to
        training if there are training and test images, else to the test split.
      users: the source of the user of an image. "folder": the folder between class and image;
        "file": the file itself, read later; "": users are not known.
      use_masks: whether masks (`bam.images.masks`) are images, not to be left out.
      log: called with lines about ignored, moved or doubtful files.
      split: the split of all images, for a folder without folders of splits.
      named: classes that the user names; one may be called like a folder of masks.

    Raises:
      DataError: for folders that cannot be classes, and for a class with fewer than two images
        (without any, if `split` is "test"): its only image would be known to be in training.
    """
    all_images, folders, ignored, _, again = tree(folder)
    below = [_names(folder, x) for x in folders]
    depth = 2 if any(split_name(x[0]) for x in below) else 1
    images, unused = all_images, Counts()
    if not use_masks:
        places = [_names(folder, x.parent) for x in images]
        of_masks = masks.folders(folder, places, depth, named, users == "folder")
        below = [x for x in below if not masks.is_inside(x, of_masks)]
        images = _without_masks(folder, images, of_masks, unused, ignored)
    _check_level(folder, images, below)
    if split and depth > 1:
        raise DataError(f"{folder} has split folders (train, test): leave out --test_folder")
    examples, nested = list[Example](), set[str]()
    by_folder = users == "folder"
    _check_links(folder, again, depth, by_folder)
    if again:
        ignored["links to folders that are read elsewhere"] = len(again)
    for file in images:
        above = _names(folder, file.parent)
        if len(above) < depth:
            unreadable = f"that cannot be read: {rows.printable(file.name)}"
            ignored["outside of class folders" if os.path.isfile(file) else unreadable] += 1
            unused["outside of class folders"] += 1
            continue
        if any(map(split_name, above[depth:])):
            raise DataError(
                f"{file}: split folders belong above classes: move it to FOLDER/test/CLASS"
            )
        if by_folder and len(above) == depth:
            raise DataError(f"{file} is not in a user's folder: move it to FOLDER/CLASS/USER")
        nested |= {"/".join(above[depth : depth + 2])} if above[depth:] else set()
        name, written = (
            rows.printable(str(file.relative_to(folder))),
            above[depth] if by_folder else "",
        )
        user = read_id(written, str(file)) if by_folder else ""
        side = split or split_name(above[0])
        examples.append(Example(name, above[depth - 1], user, side, written=written))
    if also := _in_words(ignored):
        log(f"ignored: {also}")
    if not use_masks:
        _check_words(folder, examples, named, log)
        _check_partners(folder, examples)
    classes = [x for x in below if len(x) >= depth and (depth == 1 or split_name(x[0]))]
    labels = sorted({x[depth - 1] for x in classes})
    least = 1 if split == "test" else 2
    _check_classes(folder, Counts(x.label for x in examples), labels, least, also, log)
    # "images" below a class is not a person, but folders in it may be.
    if nested and not users and not {x.casefold() for x in nested} <= masks.IMAGES:
        inside = plural(len({x.partition("/")[0] for x in nested}), "subfolder")
        log(
            f"NOT PRIVATE: images of the classes {short_list(labels)} lie in {inside}. If each of "
            "these is a person, add --user_from=folder: otherwise ε protects one image. If they "
            "are the classes, move them up one level"
        )
    if by_folder:
        _warn_of_inner(examples, depth, log)
    unique = _unique(folder, folder, examples, unused, log)
    divided = unique if split else _assign_splits(folder, unique, validation, unused, log)
    return Listed(divided, len(all_images), unused)


def _warn_of_inner(examples: Sequence[Example], depth: int, log: rows.Log) -> None:
    """Logs that folders below the users' may be the persons, as in FOLDER/CLASS/SITE/PERSON."""
    above = [Path(x.file).parts[:-1] for x in examples]
    if inner := {x[: depth + 2] for x in above if len(x) > depth + 1}:
        num = plural(len(inner), "folder")
        log(
            "NOT PRIVATE: the folder directly below a class is taken as the user, and images lie "
            f"in {num} below users' folders, as {'/'.join(min(inner))}. If these are the persons, "
            "move them to FOLDER/CLASS/PERSON: otherwise ε protects all in a user's folder as one"
        )


def with_test(
    train: Listed, test: Listed, folder: Path, test_folder: Path, log: rows.Log
) -> Listed:
    """The images of a training and a test folder, with paths relative to the training folder.

    DataError for a class that only the test folder has, and for a file in both folders.
    """
    if more := sorted({x.label for x in test.examples} - {x.label for x in train.examples}):
        raise DataError(f"{test_folder} has classes that {folder} lacks: {short_list(more)}")
    path = os.path.relpath(os.path.realpath(test_folder), os.path.realpath(folder))
    moved = [x._replace(file=os.path.join(path, x.file)) for x in test.examples]
    unused = train.unused + test.unused
    examples = _unique(folder, folder, train.examples + moved, unused, log)
    return Listed(examples, train.num_images + test.num_images, unused)


def in_table(
    folder: Path,
    table: Path,
    columns: dict[str, str],
    limit: int = 10_000_000,
    validation: str = "",
    log: rows.Log = lambda line: None,
    may_lack: str = "",
    number: bool = False,
    use_masks: bool = False,
    may_be_blank: bool = False,
) -> Listed:
    """The images that a table names.

    Args:
      folder: of the images. Paths in the table may be absolute, or relative to the folder or to the
        table, with backslashes, without a suffix or with a suffix in another case.
      table: the table. If it does not exist, it is looked for in the folder, then in its folders of
        splits; each row then has the split of its table.
      columns: field of `Example` -> column of the table. Several columns for `label` are separated
        by commas, and their values are joined by commas.
      limit: most rows.
      validation: as for `in_class_folders`.
      log: as for `in_class_folders`.
      may_lack: a column that the table may lack.
      number: whether labels are numbers. If a comma does not separate the values of the table,
        numbers may have a decimal comma.
      use_masks: as for `in_class_folders`.
      may_be_blank: whether a label may be blank, because the caller replaces it.

    Raises:
      DataError: for a column or a file that does not exist, a row that lacks a value, and a file in
        two rows that differ. A file in equal rows counts once.
    """
    images, _, ignored, *_ = tree(folder)
    examples, tables = list[Example](), _tables(folder, table)
    top = os.path.realpath(folder)
    inside = [x for x, _ in tables if Path(os.path.realpath(x)).is_relative_to(top)]
    for path, split in tables:
        names = ",".join([*columns.values(), "file_name"]).split(",")  # see `_present`
        lines = rows.read(path, names, log)
        if len(lines.values) + len(examples) > limit:
            raise DataError(f"{path}: more than {limit:,} rows")
        present = _present(path, columns, lines.header, may_lack)
        find = _finder(folder, path, images)
        new = _in_rows(folder, path, lines, present, find, may_be_blank)
        if not new:
            raise DataError(f"{path}: has no rows")
        if number and lines.has_commas:
            index = rows.column(path, lines.header, present["label"])
            cells = ((x, lines.values[x.row - lines.first][index]) for x in new)
            typed = {x.row for x, value in cells if not isinstance(value, str | bytes)}
            new = _with_points(path, new, lines.separator, typed)
        examples += new if "split" in present else [x._replace(split=split) for x in new]
        if "user" not in present:
            _warn_of_ids(lines, present, len(new), log)
    used = {_identity(folder / x.file) for x in examples}
    on_disk = {_identity(x): x for x in reversed(images)}
    unused = +Counts({MORE_NAMES: len(images) - len(on_disk)})
    # A row may name a file whose suffix is none of an image.
    named = [*map(str, inside), *used.difference(on_disk)]
    if also := _in_words(+(ignored - Counts(suffix_of(os.path.basename(x)) for x in named))):
        log(f"ignored: {also}")
    if rest := sorted(path for identity, path in on_disk.items() if identity not in used):
        unused["in no row of the table"] = len(rest)
        first = rows.printable(str(rest[0].relative_to(folder)))
        num = plural(len(rest), "image")
        log(f"{num} of the folder without a row in the table: not used (for example {first})")
    # A repeated row is not a second image, so its count goes into no sum of images.
    unique = _unique(folder, table, examples, Counts(), log)
    if not use_masks:
        unique = _rows_without_masks(folder, table, images, unique, unused, log)
    divided = _assign_splits(table, unique, validation, unused, log)
    return Listed(divided, len(images) + len(used.difference(on_disk)), unused)


def _tables(folder: Path, table: Path) -> list[tuple[Path, str]]:
    """The table, else that of the same name in the folder, else those in its split folders.

    Each has the split of the folder that it lies in, or "".
    """
    below = sorted(x for x in folder.iterdir() if split_name(x.name)) if folder.is_dir() else []
    in_splits = [x / table for x in below if (x / table).is_file()]
    single = [[x] for x in (table, folder / table) if x.is_file()]
    top = Path(os.path.realpath(folder))

    def split_of(path: Path) -> str:
        real = Path(os.path.realpath(path))
        return split_name(real.relative_to(top).parts[0]) if real.is_relative_to(top) else ""

    return [(x, split_of(x)) for x in [*single, in_splits or [table]][0]]


def _present(
    table: Path, columns: dict[str, str], header: list[str], may_lack: str
) -> dict[str, str]:
    """`columns` for this header: without `may_lack` if the header lacks it.

    A table of Hugging Face or COCO may name files in `file_name` instead of `file`. DataError, with
    a remedy, if another column may name them.
    """
    names = {x.casefold() for x in header}
    if columns["file"] == "file" and "file" not in names and "file_name" in names:
        columns = columns | {"file": "file_name"}
    names_files = re.compile(
        r"(.*[\W_])?(image|img|file|path|picture)s?([\W_]?(id|name|index|path|file))?", re.I
    )
    file_columns = [x for x in header if x not in columns.values() and names_files.fullmatch(x)]
    if columns["file"] == "file" and "file" not in names and file_columns:
        seen = one_line(short_list(header))[:300]
        advice = f"give --file_column={shlex.quote(visible(file_columns[0]))}"
        raise DataError(f"{table}: no column file among {seen}: {advice}")
    if may_lack.casefold() in names:
        return columns
    return {field: name for field, name in columns.items() if name != may_lack}


def _in_rows(
    folder: Path,
    table: Path,
    lines: rows.Rows,
    columns: dict[str, str],
    find: Callable[[str, str], str],
    may_be_blank: bool,
) -> list[Example]:
    """Returns an example for each row that is not blank.

    `find` gives the path of a file.
    """
    header, examples = lines.header, list[Example]()
    indices = {k: [rows.column(table, header, x) for x in v.split(",")] for k, v in columns.items()}
    for number, row in enumerate(lines.values, lines.first):
        texts, location = [rows.text(x) for x in row], f"{table}: row {number}"
        if not any(texts):
            continue
        if any(texts[len(header) :]):
            raise DataError(f"{location} has {len(texts)} values, the header {len(header)}")
        texts += [""] * (len(header) - len(texts))
        values = {field: [texts[x] for x in cells] for field, cells in indices.items()}
        written = ",".join(values.get("user", ()))
        if "user" in columns:
            values["user"] = _users(row, indices["user"], f"{location}: {columns['user']}")
        for field, cells in values.items():
            # "NA" may be the name of a class, but not of a file, a user or a split.
            names = columns[field].split(",")
            lacks = [
                name
                for name, x in zip(names, cells, strict=True)
                if (not x and not may_be_blank if field == "label" else is_missing(x))
            ]
            if lacks:
                if field == "user" and any(texts[x] for x in indices["user"]):
                    raise DataError(f"{location} {_no_user(lines, indices['user'], number)}")
                blanks = "; --map=:0 makes zeros of blanks" * (field == "label" and len(names) > 1)
                raise DataError(f"{location} lacks a value of {short_list(lacks)}{blanks}")
        if len(values["label"]) > 1:  # zeros and ones as JSON, Parquet and pandas write them
            values["label"] = [ZEROS_AND_ONES.get(x, x) for x in values["label"]]
        # Of users not by a comma: "1" and "12e5" would look like the rounded number 1,12e5.
        joined = {k: ("|" if k == "user" else ",").join(cells) for k, cells in values.items()}
        example = Example(**joined, row=number, written=written)
        if example.split and not split_name(example.split):
            raise DataError(f"{location}: split {example.split!r} is not train, validation or test")
        file, split = find(example.file, location), split_name(example.split)
        examples.append(example._replace(file=file, split=split))
    return examples


def _no_user(lines: rows.Rows, indices: list[int], number: int) -> str:
    """Says that the user of a row is written, but means missing, and of how many rows."""

    def wrong(row: Sequence[object]) -> list[str]:
        cells = [(i, row[i]) for i in indices if i < len(row) and rows.text(row[i])]
        return [f"{lines.header[i]} {rows.text(x)[:80]!r}" for i, x in cells if _is_nobody(x)]

    row, num = lines.values[number - lines.first], sum(any(wrong(x)) for x in lines.values)
    means = f"{wrong(row)[0]} means missing (docs/users.md), in {plural(num, 'row')}"
    return f"has no user: {means}: leave them out or name the person"


def _is_nobody(value: object) -> bool:
    try:
        return not user_id(value)
    except InputError:
        return False


def _users(row: Sequence[object], indices: list[int], location: str) -> list[str]:
    """The `user_id` of the values at these indices, "" for a missing one."""
    try:
        # Not of texts: those of floats would hide that rounding may have merged persons.
        ids = [user_id(row[x] if x < len(row) else "") for x in indices]
    except InputError as error:
        raise DataError(f"{location}: {error}") from error
    # So that the columns "a|b" and "c" differ from "a" and "b|c".
    return [x.replace("\\", "\\\\").replace("|", "\\|") for x in ids] if ids[1:] else ids


def _with_points(
    table: Path, examples: list[Example], separator: str, typed: Collection[int]
) -> list[Example]:
    """Returns the examples with decimal points in place of decimal commas.

    Raises DataError if a mark may separate thousands, or if both marks occur. Only texts are
    doubtful, not the numbers of JSON and Parquet, whose rows are `typed`. Points may separate
    thousands, if no number shows that they do not, in three kinds of tables: those whose values are
    separated by semicolons, as where the comma is the decimal mark, those with a decimal comma, and
    other texts with whole numbers, because next to 41.480 with fixed digits 841 is 841.000.
    """
    labels = {x.label for x in examples if x.row not in typed}
    commas = {x for x in labels if rows.decimal(x) != x}
    points = {x for x in labels if x.count(".") == 1 and "," not in x}
    is_mixed = any(x.lstrip("+-").isdecimal() for x in labels)
    doubtful = set[str]()
    if all(map(rows.may_be_thousands, commas)):
        doubtful |= commas
    if all(map(rows.may_be_thousands, points)) and (separator == ";" or commas or is_mixed):
        doubtful |= points
    for example in examples:
        if example.label in doubtful and example.row not in typed:
            # Other numbers may show that the mark of decimals is a comma.
            mark = "," if commas - doubtful else "."
            point, whole = (re.sub("[.,]", x, example.label) for x in (mark, ""))
            raise DataError(
                f"{table}: {example.place}: {example.label!r} may have decimals or thousands: "
                f"write {point}0 or {whole}"
            )
    marks = {x for x in points if re.fullmatch(r"[+-]?\d*\.\d*(e[+-]?\d+)?", x, re.I)}
    if commas and marks:
        both = f"{min(commas)!r} and {min(marks)!r}"
        raise DataError(f"{table}: decimal commas and points are mixed, {both}: write all alike")
    return [x._replace(label=rows.decimal(x.label)) for x in examples]


def _warn_of_ids(lines: rows.Rows, columns: dict[str, str], num_rows: int, log: rows.Log) -> None:
    """Logs columns that may name persons: by their name, and with fewer values than rows."""
    header, values = lines.header, lines.values
    for name in (x for x in header if x not in columns.values() and rows.IDS.search(x)):
        ids = {rows.text(row[header.index(name)]) for row in values if len(row) == len(header)}
        if 1 < len(ids) < num_rows:
            log(
                f"NOT PRIVATE: column {name} has {len(ids):,} values in {len(values):,} rows; if "
                f"it names persons, give --user_column={name} to protect them"
            )


def _in_words(ignored: Counts) -> str:
    """The numbers of ignored files by reason or suffix, each with a remedy if there is one."""
    remedies = {kind: f": {READ_BY[kind]}" for kind in ignored if kind in READ_BY}
    return ", ".join(f"{num:,} {x}{remedies.get(x, '')}" for x, num in ignored.most_common())


def split_name(text: str) -> str:
    """Returns the split that the name of a folder or a value in a table means.

    Returns "" for any other text.
    """
    return SPLIT_NAMES.get(text.strip().casefold(), "")


def _check_level(folder: Path, images: list[Path], below: list[tuple[str, ...]]) -> None:
    """DataError for splits beside classes, and for a folder one or more levels too high."""
    inner, inside = 0, {x[0] for x in below}
    splits = sorted(filter(split_name, inside))
    full = {rows.normal(x.relative_to(folder).parts[0]) for x in images if x.parent != folder}
    if splits and (classes := sorted(full.difference(splits))):
        raise DataError(
            f"{folder} mixes split folders ({short_list(splits)}) with others "
            f"({short_list(classes)}): move the classes into the split folders, and rename a "
            "class that is called like a split"
        )
    second, third = ({x[level] for x in below if len(x) > level} for level in (1, 2))
    are_below = all(len(x.relative_to(folder).parts) > 3 for x in images)
    if splits and len(second) == 1 < len(third) and images and are_below:
        level = f"{splits[0]}/{min(second)}"
        raise DataError(
            f"{folder}: all images lie in one folder below each split, as {level}, which would "
            "be the only class: move the folders in it up one level"
        )
    while len(inside) == 1 and not splits:
        inner += 1
        inside = {x[inner] for x in below if len(x) > inner}
    meant = folder.joinpath(*max(below, default=())[:inner])
    if inner and len(inside) > 1 and meant not in {x.parent for x in images}:
        raise DataError(f"{folder} contains one folder only: did you mean {meant}?")


def _check_links(folder: Path, again: dict[Path, Path], depth: int, users: bool) -> None:
    """DataError for a link that gives the images of a folder a second split, label or user."""
    for link, first in again.items():
        fields = []
        for path in (link, first):
            above = [rows.normal(x) for x in path.relative_to(folder).parts]
            fields.append((split_name((above or [""])[0]), above[depth - 1 : depth + users]))
        if fields[0] != fields[1]:
            raise DataError(
                f"{link} links to {first}, so its images would have two labels, users or splits: "
                "remove one"
            )


def _check_classes(
    folder: Path, images: Counts, labels: list[str], least: int, also: str, log: rows.Log
) -> None:
    """Checks that each class has at least `least` images.

    Raises DataError if not. Logs names that are odd for a class.
    """
    counts = short_list([f"{name} {images[name]:,}" for name in labels]) + " (NOT PRIVATE)"
    also = f"; ignored: {also}" if also else ""
    if not images:
        beside = sorted(x.name for x in folder.iterdir() if x.suffix.lower() in rows.SUFFIXES)
        names = (*_TABLES, *beside)
        tables = [name for name in names if _tables(folder, Path(name))[0][0].is_file()]
        hint = f"; {tables[0]} may name them: --labels={tables[0]} --classes=…" if tables else ""
        if set(beside) & {"train.parquet", "test.parquet"}:
            hint = "; if Parquet files hold the images, import nothing, and add to bam train "
            hint += f"--config.dataset.source=parquet --config.dataset.path={folder}"
        raise DataError(f"{folder}: no folder of a class with images in it{also}{hint}")
    for name in labels:
        if "\\udc" in name:
            raise DataError(f"{folder}: class {name} has a name that is not UTF-8{also}")
    if few := [name for name in labels if images[name] < least]:
        num, more = "one image" if images[few[0]] else "no image", ""
        if few[1:]:
            more = f", as {'have' if few[2:] else 'has'} {short_list(few[1:])}"
        raise DataError(
            f"{folder}: class {few[0]} has {num}{more}; a class needs two images, so move the "
            f"folders of others away. Images of each class: {counts}{also}"
        )
    same = Counts(name.strip().casefold() for name in labels)
    odd = [
        name
        for name in labels
        if name != name.strip()
        or split_name(name)
        or same[name.casefold()] > 1
        or masks.is_folder(name.strip(), only=True)
    ]
    if odd:
        log(f"unusual class names: {short_list(odd)}. Images of each class: {counts}")


def _masks(images: Sequence[Path]) -> dict[Path, list[list[Path]]]:
    """Those of the images that are named as masks of others, as `masks.beside_images` says."""
    return masks.beside_images([(x, _stem(x), suffix_of(x.name)) for x in images if x.is_file()])


def _without_masks(
    folder: Path,
    images: list[Path],
    of_masks: Collection[tuple[str, ...]],
    unused: Counts,
    ignored: Counts,
) -> list[Path]:
    """Images without masks, which are counted."""
    inside = {x for x in images if masks.is_inside(_names(folder, x.parent), of_masks)}
    if excluded := _masks(images).keys() | inside:
        unused["masks"] = len(excluded)
        first = rows.printable(str(min(excluded).relative_to(folder)))
        kind = f"mask{'s' * (len(excluded) > 1)}"
        ignored[f"{kind}, as {first}: --masks uses them"] = len(excluded)
    return [x for x in images if x not in excluded]


def _rows_without_masks(
    folder: Path,
    table: Path,
    images: Sequence[Path],
    examples: list[Example],
    unused: Counts,
    log: rows.Log,
) -> list[Example]:
    """Examples without masks of the folder's images, which are counted.

    Here a folder of masks is one beside a folder of images. An image of a user is left out for no
    image of another: then whether one user is there would change the images of the other.

    Raises:
      DataError: if a row names a mask and only rows of other users name its image, and if no
        example is left.
    """
    in_folders = masks.in_folders([(x, _names(folder, x.parent)) for x in images])
    of_images = {_identity(x): y for part in (_masks(images), in_folders) for x, y in part.items()}
    left_out = [x for x in examples if _identity(folder / x.file) in of_images]
    if left_out and left_out[0].user:
        _check_owners(folder, table, images, examples, left_out, of_images)
    if len(left_out) == len(examples):
        raise DataError(f"{table}: each row names a mask, as {left_out[0].place}: add --masks")
    if left_out:
        unused["masks"] = len(left_out)
        num = plural(len(left_out), "row")
        log(f"{num} left out for naming masks, as {left_out[0].place}: --masks uses them")
    remaining = [x for x in examples if _identity(folder / x.file) not in of_images]
    _warn_of_words(remaining, log)
    return remaining


def _check_owners(
    folder: Path,
    table: Path,
    images: Sequence[Path],
    examples: list[Example],
    left_out: list[Example],
    of_images: dict[str, list[list[Path]]],
) -> None:
    """DataError for a mask whose images, if rows name any, are of other users alone.

    `of_images` are lists of the images of each mask, which has the key `_identity`.
    """
    of_file = {_identity(folder / x.file): x for x in examples}
    row_of = {x: of_file.get(_identity(x)) for x in images}
    first_rows = dict[int, dict[str, Example]]()  # of each user, by the list, which many may share
    for example in left_out:
        of_users = dict[str, Example]()
        for paths in of_images[_identity(folder / example.file)]:
            if id(paths) not in first_rows:
                listed = [row for x in reversed(paths) if (row := row_of[x])]
                first_rows[id(paths)] = {x.user: x for x in listed}
            of_users |= first_rows[id(paths)]
        if of_users and example.user not in of_users:
            other = min(of_users.values(), key=lambda x: x.row)
            raise DataError(
                f"{table}: {example.place} is called like a mask of {other.place}, which is of "
                "another user: add --masks to import it, or remove the row"
            )


def _warn_of_words(examples: Sequence[Example], log: rows.Log) -> list[Example]:
    """Logs the number of images with a word for masks in their names, and returns them."""
    with_word = [x for x in examples if masks.has_word(_stem(Path(x.file)))]
    if with_word:
        are = "image is" if len(with_word) == 1 else "images are"
        log(
            f"NOT PRIVATE: {len(with_word):,} {are} called like masks, as {with_word[0].file}, but "
            "not beside an image of that name: imported as images; if they are masks, remove them"
        )
    return with_word


def _check_words(
    folder: Path, examples: Sequence[Example], named: Sequence[str], log: rows.Log
) -> None:
    """DataError for a class, unless it is `named`, all of whose images are called like masks.

    If those of each class are, they are not the masks of others.
    """
    with_word = Counts(x.label for x in _warn_of_words(examples, log))
    images = Counts(x.label for x in examples)
    full = [x for x in sorted(images) if images[x] == with_word[x]]
    for name in full if len(full) < len(images) else ():
        if name not in named:
            first = min(x.file for x in examples if x.label == name)
            raise DataError(
                f"{folder}: all images of class {name} are called like masks, as {first}: make "
                "FOLDER/CLASS/… of the images, without the masks. If they are classes, add "
                f"--classes={','.join(sorted(images))}"
            )


def _check_partners(folder: Path, examples: Sequence[Example]) -> None:
    """DataError if most images have another of their name and one common word, as `x_lesion`."""
    files = {(str(Path(x.file).parent), _stem(Path(x.file))): x.file for x in examples}
    if partners := masks.with_partners(files):
        raise DataError(
            f"{folder}: {len(partners):,} files are named like another and one more word, as "
            f"{files[partners[0]]}: are they masks? Remove them, or import them as images with "
            "--masks"
        )


def _names(folder: Path, path: Path) -> tuple[str, ...]:
    """The names of the folders from `folder` down to `path`, in composed characters."""
    return tuple(map(rows.normal, path.relative_to(folder).parts))


def _assign_splits(
    source: Path, examples: list[Example], validation: str, unused: Counts, log: rows.Log
) -> list[Example]:
    """Returns the examples with their split.

    Without a test split, all have "", and a hash splits them later.
    """
    images = collections.Counter(x.split for x in examples)
    validation = validation or ("train" if images["train"] and images["test"] else "test")
    if images["validation"]:
        moved = "left out" if validation == "leave" else f"put in the {validation} split"
        num = plural(images["validation"], "validation image")
        log(f"{num} {moved}: --validation=leave, train or test changes that")
    into = {"validation": validation}
    moved_examples = [x._replace(split=into.get(x.split, x.split)) for x in examples]
    remaining = [x for x in moved_examples if x.split != "leave"]
    if num_left := len(moved_examples) - len(remaining):
        unused["for validation"] = num_left
    splits = {x.split for x in remaining}
    if splits == {"train"}:
        log("there is no test split, so a hash chooses a share (--test) of the images for it")
        return [x._replace(split="") for x in remaining]
    if not splits & {"train", ""}:
        raise DataError(f"{source}: no training images, but {short_list(sorted(images))}")
    return remaining


def _identity(path: Path) -> str:
    """A text that all names of one file share: its path without links, if the file exists."""
    return rows.printable(os.path.realpath(path) if os.path.exists(path) else str(path))


def _unique(
    folder: Path, source: Path, examples: list[Example], unused: Counts, log: rows.Log
) -> list[Example]:
    """Each file once, by its path without links.

    ε protects one example, so an image in two of them would be protected less.
    """
    first: dict[str, Example] = {}
    for example in examples:
        other = first.setdefault(_identity(folder / example.file), example)
        if other[1:4] != example[1:4]:
            raise DataError(
                f"{source}: {example.place} occurs again as {other.place} with another label, user "
                "or split: remove one"
            )
    if repeated := len(examples) - len(first):
        num = plural(repeated, "further name")
        log(f"{num} of a listed file, with equal label, user and split: each file counts once")
        unused[MORE_NAMES] += repeated
    return list(first.values())


def _finder(folder: Path, table: Path, images: Sequence[Path]) -> Callable[[str, str], str]:
    """A function from a path in the table, and its location for errors, to a path in the folder."""
    top, real = os.path.abspath(folder), os.path.realpath(folder)
    bases = [top, os.path.abspath(table.parent)]
    if Path(bases[1]).is_relative_to(top):
        bases.reverse()  # a table in the folder of a split names the files beside it
    index = collections.defaultdict[str, set[str]](set)  # in lower case, with or without suffix
    below = collections.defaultdict[str, set[str]](set)  # the same of names without their folders

    def key(path: str | Path) -> str:
        return rows.normal(os.path.relpath(path, top)).casefold()

    def find(text: str, location: str) -> str:
        spelled = (text, text.replace("\\", "/"))
        paths = [os.path.normpath(os.path.join(base, x)) for x in spelled for base in bases]
        for path in filter(os.path.isfile, paths):
            resolved = os.path.relpath(os.path.realpath(path), real)
            # As written, because a link's name says the format; or a link leads into the folder.
            for file in (os.path.relpath(path, top), resolved):
                if not file.startswith(".."):
                    return file
        # Filled for the first path that does not exist as written: most tables need no index.
        for image in () if index else images:
            file = rows.printable(str(image.relative_to(folder)))
            for name in (image, image.with_suffix("")):
                index[key(name)].add(file)
                if Path(os.path.abspath(image)).is_relative_to(bases[0]):
                    below[rows.normal(name.name).casefold()].add(file)
        meant = sorted(set[str]().union(*(index.get(key(x), ()) for x in paths)))
        # A name without folders may be that of a file in any folder, as of HAM10000's two.
        if not meant and not set("/\\") & set(text):
            meant = sorted(below[rows.normal(text).casefold()])
        if len(meant) == 1:
            return meant[0]
        choices = f"; several could be meant: {short_list(meant)}" if meant else ""
        if any(os.path.isfile(os.path.join(os.path.dirname(top), x)) for x in spelled):
            choices = f"; it lies in {os.path.dirname(top)}: import that folder"
        raise DataError(f"{location}: no file {text[:200]} in {folder}{choices}")

    return find


class Tree(NamedTuple):
    """All files and folders below a folder.

    Attributes:
      images: image files. A broken link or an unreadable folder is among them, so that the import
        reports its name.
      folders: each once, however many links lead to it.
      ignored: reason or suffix -> number of other files.
      bare: those of them without a suffix.
      again: a link to a folder that another path reached before -> that path.
    """

    images: list[Path]
    folders: list[Path]
    ignored: Counts
    bare: list[Path]
    again: dict[Path, Path]


def tree(folder: Path) -> Tree:
    """The images and folders below a folder, sorted by name."""
    if not folder.is_dir():
        is_file = f"a file, not a folder: {_for_file(folder)}"
        raise DataError(f"{folder}: {is_file if folder.is_file() else 'no such folder'}")
    listed = Tree([], [], Counts(), [], {})
    top = Path(os.path.realpath(folder))
    walked = {str(x): folder for x in (top, *top.parents)}
    # Links are walked last, because a folder has its own name, not that of a link to it.
    start, links = folder, collections.deque[Path]()
    # A stack of open folders, because recursion ends some thousand folders deep.
    stack = [iter([folder])]
    while stack or links:
        if not stack:
            start = links.popleft()
            stack = [iter([start])]
        for path in stack[-1]:
            if path != folder and _is_junk(path.name):
                listed.ignored["hidden or of the system"] += 1
            elif os.path.isdir(path):
                if path != start and path.is_symlink():
                    links.append(path)
                    continue
                real = os.path.realpath(path)
                if path != folder and real in walked:
                    if path.is_relative_to(walked[real]):
                        listed.ignored["links in circles"] += 1
                    else:
                        listed.again[path] = walked[real]
                    continue
                if path != folder:
                    walked[real] = path
                    listed.folders.append(path)
                try:
                    stack.append(iter(sorted(path.iterdir())))
                except OSError:
                    listed.images.append(path)
                    continue
                break
            elif suffix_of(path.name) in SUFFIXES or not os.path.exists(path):
                listed.images.append(path)
            else:
                suffix = suffix_of(path.name)
                listed.ignored[suffix] += 1
                if suffix == "no suffix":
                    listed.bare.append(path)
        else:
            stack.pop()
    listed.images.sort()
    listed.folders.sort()
    return listed


def _for_file(file: Path) -> str:
    """What to do with a file that was given for a folder of images."""
    match suffix_of(file.name):
        case ".parquet" | ".pq":
            return (
                "if it holds the images, name it train.parquet, put test.parquet beside it, and "
                "add --config.dataset.source=parquet --config.dataset.path=FOLDER to bam train"
            )
        case suffix if suffix in rows.SUFFIXES:
            return f"give the folder of the images it names, and --labels={file}"
        case ".npy" | ".npz":
            return "save each image as a file of its own, PNG or .npy, in FOLDER/CLASS"
        case suffix if suffix in SUFFIXES:
            return "give the folder of the classes, FOLDER/CLASS/IMAGE"
    return "unpack it"


def _is_junk(name: str) -> bool:
    return name.startswith((".", "~$")) or name.casefold() in JUNK


def suffix_of(name: str) -> str:
    """Returns the suffix of a file name in lower case, as a key of `READ_BY`.

    Returns "no suffix" if there is none.
    """
    last = "".join(Path(name).suffixes[-2:]).lower()
    return last if last in (*READ_BY, *SUFFIXES) else Path(name).suffix.lower() or "no suffix"


def _stem(image: Path) -> str:
    """The name of an image without its suffix, equal for names that look equal."""
    suffix = suffix_of(image.name)
    name = image.name[: -len(suffix)] if image.name.lower().endswith(suffix) else image.name
    return rows.normal(name).casefold()
