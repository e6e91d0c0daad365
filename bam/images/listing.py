"""Which images there are, and what each one's label is: folders of classes, or a table."""

import collections
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bam import files
from bam.data.common import DataError
from bam.images import rows

SUFFIXES = (  # the last ones are read by packages of extras
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".jp2",
    ".j2k", ".avif", ".npy", ".dcm", ".dicom", ".ima", ".heic", ".heif", ".nii", ".nii.gz",
)  # fmt: skip
# Suffixes of images that are not read -> what to do.
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
# What systems and programs leave in folders, beside names that begin with a dot.
JUNK = {
    "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "icon\r",
    "system volume information", "lost+found", "__pycache__",
}  # fmt: skip
MISSING = {"", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None", "<NA>"}
# What the name of a mask has behind that of its image, and folders of masks beside such of images.
_MASK = re.compile(r"(.+)[_-](mask|masks|seg|segmentation|gt|label|labels)", re.I | re.S)
_MASKS = {"mask", "masks", "seg", "segmentation", "gt", "annotations", "labels"}
_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # as Hugging Face names them
_IDS = re.compile(r"(patient|person|subject|participant|user|client|owner)|(^|_)p?id$", re.I)

MORE_NAMES = "more names of one file"

Counts: TypeAlias = collections.Counter[str]


class Example(NamedTuple):
    """An image file, relative to the folder; "" where a table or a folder does not say.

    A label is the name of a class, a number, or of several labels zeros and ones: "0,1,1". `row` is
    that of the table, as a spreadsheet counts it; 0: there is no table.
    """

    file: str
    label: str
    user: str = ""
    split: str = ""
    row: int = 0

    @property
    def place(self) -> str:
        """How an error names it."""
        return f"row {self.row}: {self.file}" if self.row else self.file


class Listed(NamedTuple):
    """The images that are used, and how many are not.

    Attributes:
      examples: each image once.
      num_images: image files that are there, or that a table names: examples and unused ones.
      unused: why -> how many images.
    """

    examples: list[Example]
    num_images: int
    unused: Counts


def in_class_folders(
    folder: Path,
    validation: str = "",
    users: str = "",
    masks: bool = False,
    log: rows.Log = lambda line: None,
    split: str = "",
) -> Listed:
    """The images of FOLDER/CLASS/…, or of FOLDER/train/CLASS/… and FOLDER/test/CLASS/….

    Images of `validation` go to "train", "test" or "leave"; "": to training, or to the test where
    there is no other. `users` says what names the user of an image: "folder", the one between class
    and image; "file", what is in it; "": nothing. With `masks`, an image img_mask beside img counts
    as one. `log` is given lines on what is ignored, moved or doubtful. `split`: that of all images
    of the folder, which has none. DataError for folders that are no classes, and for a class
    without images or with one, which would be known to be in training.
    """
    all_images, folders, ignored, again = tree(folder)
    images = all_images if masks else _without_masks(all_images)
    unused = +Counts({"masks": len(all_images) - len(images)})
    if unused:
        ignored["masks beside their images: --masks uses them"] = unused["masks"]
    below = [tuple(map(rows.normal, x.relative_to(folder).parts)) for x in folders]
    _check_level(folder, images, below)
    depth = 2 if any(split_name(x[0]) for x in below) else 1
    if split and depth > 1:
        raise DataError(f"{folder}: has folders of splits; with --test_folder it must have none")
    examples, nested = list[Example](), set[str]()
    by_folder = users == "folder"
    _check_links(folder, again, depth, by_folder)
    if again:
        ignored["links to folders that are read elsewhere"] = len(again)
    for file in images:
        *above, _ = map(rows.normal, file.relative_to(folder).parts)
        if len(above) < depth:
            unreadable = f"that cannot be read: {rows.printable(file.name)}"
            ignored["outside of class folders" if os.path.isfile(file) else unreadable] += 1
            unused["outside of class folders"] += 1
            continue
        if any(map(split_name, above[depth:])):
            raise DataError(f"{file}: a split belongs above the classes: FOLDER/test/CLASS")
        if by_folder and len(above) == depth:
            raise DataError(f"{file}: is in no folder of a user, between class and image")
        nested |= set(above[depth : depth + 1])
        name, user = (
            rows.printable(str(file.relative_to(folder))),
            above[depth] if by_folder else "",
        )
        examples.append(Example(name, above[depth - 1], user, split or split_name(above[0])))
    if also := _in_words(ignored):
        log(f"ignored: {also}")
    named = [x for x in below if len(x) >= depth and (depth == 1 or split_name(x[0]))]
    labels = sorted({x[depth - 1] for x in named})
    least = 1 if split == "test" else 2
    _check_classes(folder, Counts(x.label for x in examples), labels, least, also, log)
    if nested and not users:
        log(
            f"NOT PRIVATE: images of the classes {files.listed(labels)} lie in {len(nested):,} "
            f"subfolder{'s' * (len(nested) > 1)}. If each is a person, add --user_from=folder: "
            "otherwise ε protects one image. If they are the classes, move them up one level"
        )
    once = _once(folder, folder, examples, unused, log)
    divided = once if split else _divided(folder, once, validation, unused, log)
    return Listed(divided, len(all_images), unused)


def with_test(
    train: Listed, test: Listed, folder: Path, test_folder: Path, log: rows.Log
) -> Listed:
    """Images of two folders, the second of test images; their paths are from the first.

    DataError for a class of the second that the first lacks, and for a file that is in both.
    """
    if more := sorted({x.label for x in test.examples} - {x.label for x in train.examples}):
        raise DataError(f"{test_folder}: {files.listed(more)}: no class of {folder}")
    to = os.path.relpath(os.path.realpath(test_folder), os.path.realpath(folder))
    moved = [x._replace(file=os.path.join(to, x.file)) for x in test.examples]
    unused = train.unused + test.unused
    examples = _once(folder, folder, train.examples + moved, unused, log)
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
) -> Listed:
    """The images that a table names, by `columns`: of `Example`'s fields, its own.

    Paths are in FOLDER, however they are written: absolute or relative to FOLDER or to the table,
    with backslashes, without a suffix or with one of another case. Several columns of labels are
    separated by commas, and so are their values then. `validation` and `log` are as above; the
    column called `may_lack` need not be there. A `number` may have a decimal comma where values are
    not separated by commas. A table that is not there is looked for in FOLDER, and in its folders
    of splits, which are those of its rows then. DataError for another column or a file that is not
    there, a row without a value, and one file in rows that differ; rows that say the same count
    once.
    """
    images, _, ignored, _ = tree(folder)
    examples, tables = list[Example](), _tables(folder, table)
    top = os.path.realpath(folder)
    inside = [x for x, _ in tables if Path(os.path.realpath(x)).is_relative_to(top)]
    if also := _in_words(+(ignored - Counts(suffix_of(x.name) for x in inside))):
        log(f"ignored: {also}")
    for path, split in tables:
        lines = rows.read(path, ",".join(columns.values()).split(","), log)
        if len(lines.values) + len(examples) > limit:
            raise DataError(f"{path}: more than {limit:,} rows")
        present = _present(columns, lines.header, may_lack)
        own = _in_rows(folder, path, lines, present, _finder(folder, path, images))
        if not own:
            raise DataError(f"{path}: has no rows")
        own = _with_points(path, own) if number and lines.has_commas else own
        examples += own if "split" in present else [x._replace(split=split) for x in own]
        if "user" not in present:
            _say_ids(lines, present, len(own), log)
    used = {_identity(folder / x.file) for x in examples}
    there = {_identity(x): x for x in reversed(images)}
    unused = +Counts({MORE_NAMES: len(images) - len(there)})
    if rest := sorted(path for identity, path in there.items() if identity not in used):
        unused["in no row of the table"] = len(rest)
        first = rows.printable(str(rest[0].relative_to(folder)))
        num = files.counted(len(rest), "image")
        log(f"not used, in no row of the table: {num} of the folder, as {first}")
    once = _once(folder, table, examples, Counts(), log)  # rows, not files, are there again
    divided = _divided(table, once, validation, unused, log)
    return Listed(divided, len(images) + len(used.difference(there)), unused)


def _tables(folder: Path, table: Path) -> list[tuple[Path, str]]:
    """A table as named, else of that name in the folder, else in its folders of splits: "train"."""
    below = sorted(x for x in folder.iterdir() if split_name(x.name)) if folder.is_dir() else []
    near = [x / table for x in below if (x / table).is_file()]
    places = [[x] for x in (table, folder / table) if x.is_file()]
    top = Path(os.path.realpath(folder))

    def split_of(path: Path) -> str:
        real = Path(os.path.realpath(path))
        return split_name(real.relative_to(top).parts[0]) if real.is_relative_to(top) else ""

    return [(x, split_of(x)) for x in [*places, near or [table]][0]]


def _present(columns: dict[str, str], header: list[str], may_lack: str) -> dict[str, str]:
    """Columns that a header has: `file` may be `file_name`, as Hugging Face and COCO have it."""
    names = {x.casefold() for x in header}
    if columns["file"] == "file" and "file" not in names and "file_name" in names:
        columns = columns | {"file": "file_name"}
    if may_lack.casefold() in names:
        return columns
    return {field: name for field, name in columns.items() if name != may_lack}


def _in_rows(
    folder: Path,
    table: Path,
    lines: rows.Rows,
    columns: dict[str, str],
    find: Callable[[str, str], str],
) -> list[Example]:
    header, examples = lines.header, list[Example]()
    places = {k: [rows.column(table, header, x) for x in v.split(",")] for k, v in columns.items()}
    for number, row in enumerate(lines.values, lines.first):
        texts, where = [rows.text(x) for x in row], f"{table}: row {number}"
        if not any(texts):
            continue
        if any(texts[len(header) :]):
            raise DataError(f"{where} has {len(texts)} values, the header {len(header)}")
        texts += [""] * (len(header) - len(texts))
        values = {field: [texts[x] for x in own] for field, own in places.items()}
        for field, own in values.items():
            if not {""}.union(MISSING if field != "label" else ()).isdisjoint(own):
                raise DataError(f"{where} lacks a value of {columns[field]}")
        if len(values["label"]) > 1:
            values["label"] = [{"True": "1", "False": "0"}.get(x, x) for x in values["label"]]
        example = Example(**{field: ",".join(own) for field, own in values.items()}, row=number)
        if example.split and not split_name(example.split):
            raise DataError(f"{where}: split {example.split!r} is not train, validation or test")
        file, split = find(example.file, where), split_name(example.split)
        examples.append(example._replace(file=file, split=split))
    return examples


def _with_points(table: Path, examples: list[Example]) -> list[Example]:
    """Examples whose decimal commas are points; DataError if they may be those of thousands."""
    with_comma = [x for x in examples if rows.decimal(x.label) != x.label]
    if with_comma and all(len(x.label.partition(",")[2]) == 3 for x in with_comma):
        first = with_comma[0]
        raise DataError(
            f"{table}: {first.place}: {first.label!r} may be a decimal number or thousands: write "
            f"{rows.decimal(first.label)} or {first.label.replace(',', '')}"
        )
    return [x._replace(label=rows.decimal(x.label)) for x in examples]


def _say_ids(lines: rows.Rows, columns: dict[str, str], num_rows: int, log: rows.Log) -> None:
    """A line on a column that may name persons."""
    header, values = lines.header, lines.values
    for name in (x for x in header if x not in columns.values() and _IDS.search(x)):
        ids = {rows.text(row[header.index(name)]) for row in values if len(row) == len(header)}
        if 1 < len(ids) < num_rows:
            log(
                f"NOT PRIVATE: column {name} has {len(ids):,} values in {len(values):,} rows; if "
                f"it names persons, give --user_column={name} to protect them"
            )


def _in_words(ignored: Counts) -> str:
    """How many files are not read, by suffix, and what to do about them."""
    reads = {what: f": {READ_BY[what]}" for what in ignored if what in READ_BY}
    return ", ".join(f"{num:,} {x}{reads.get(x, '')}" for x, num in ignored.most_common())


def split_name(text: str) -> str:
    """The split that a folder or a value of a table names, or ""."""
    return SPLIT_NAMES.get(text.strip().casefold(), "")


def _check_level(folder: Path, images: list[Path], below: list[tuple[str, ...]]) -> None:
    """DataError for splits beside classes, and for the folder above the one that is meant."""
    inner, inside = 0, {x[0] for x in below}
    splits = sorted(filter(split_name, inside))
    full = {rows.normal(x.relative_to(folder).parts[0]) for x in images if x.parent != folder}
    if splits and (classes := sorted(full.difference(splits))):
        raise DataError(
            f"{folder}: {files.listed(splits)} name a split, {files.listed(classes)} do not: move "
            "classes into the folders of splits, and rename a class that has such a name"
        )
    while len(inside) == 1 and not splits:
        inner += 1
        inside = {x[inner] for x in below if len(x) > inner}
    meant = folder.joinpath(*max(below, default=())[:inner])
    if inner and len(inside) > 1 and meant not in {x.parent for x in images}:
        raise DataError(f"{folder}: has one folder alone, of folders: did you mean {meant}?")


def _check_links(folder: Path, again: dict[Path, Path], depth: int, users: bool) -> None:
    """DataError for a link to a folder whose images have another split, label or user there."""
    for link, first in again.items():
        facts = []
        for path in (link, first):
            above = [rows.normal(x) for x in path.relative_to(folder).parts]
            facts.append((split_name((above or [""])[0]), above[depth - 1 : depth + users]))
        if facts[0] != facts[1]:
            raise DataError(
                f"{link} leads to {first}, whose images are there 2 times then, with another label,"
                " user or split; an image has one label"
            )


def _check_classes(
    folder: Path, images: Counts, labels: list[str], least: int, also: str, log: rows.Log
) -> None:
    """DataError for a class of less than so many images; a line if a name is odd."""
    shown = files.listed([f"{name} {images[name]:,}" for name in labels]) + " (NOT PRIVATE)"
    also = f"; ignored: {also}" if also else ""
    if not images:
        beside = sorted(x.name for x in folder.iterdir() if x.suffix.lower() in rows.SUFFIXES)
        names = (*_TABLES, *beside)
        tables = [name for name in names if _tables(folder, Path(name))[0][0].is_file()]
        hint = f"; {tables[0]} may name them: --labels={tables[0]} --classes=…" if tables else ""
        raise DataError(f"{folder}: no folder of a class with images in it{also}{hint}")
    for name in labels:
        few = "one image" if images[name] else "no image"
        if "\\udc" in name or images[name] < least:
            why = "a name that is not UTF-8" if "\\udc" in name else f"{few}; a class needs two"
            raise DataError(f"{folder}: class {name} has {why}: {shown}{also}")
    same = Counts(name.strip().casefold() for name in labels)
    odd = [
        name
        for name in labels
        if name != name.strip()
        or split_name(name)
        or same[name.casefold()] > 1
        or name.strip().casefold() in _MASKS
    ]
    if odd:
        log(f"are these meant as classes: {files.listed(odd)}? Images of each: {shown}")


def _without_masks(images: list[Path]) -> list[Path]:
    """Images but for those whose name is another's in the folder with "_mask" or the like."""
    names = {(x.parent, _stem(x)) for x in images if x.is_file()}

    def is_mask(image: Path) -> bool:
        match = _MASK.fullmatch(_stem(image))
        return match is not None and (image.parent, match[1]) in names and image.is_file()

    return [x for x in images if not is_mask(x)]


def _divided(
    where: Path, examples: list[Example], validation: str, unused: Counts, log: rows.Log
) -> list[Example]:
    """Examples whose split is training or test, or drawn by hash where there is no test."""
    images = collections.Counter(x.split for x in examples)
    validation = validation or ("train" if images["train"] and images["test"] else "test")
    if images["validation"]:
        moved = "left out" if validation == "leave" else f"put in the {validation} split"
        log(f"{images['validation']:,} validation images are {moved}: --validation chooses that")
    into = {"validation": validation}
    there = [x._replace(split=into.get(x.split, x.split)) for x in examples]
    if left := sum(x.split == "leave" for x in there):
        unused["for validation"] = left
    there = [x for x in there if x.split != "leave"]
    given = {x.split for x in there}
    if given == {"train"}:
        log("there is no test split: a share of the training images (--test) is drawn by hash")
        return [x._replace(split="") for x in there]
    if not given & {"train", ""}:
        raise DataError(f"{where}: no training images, but {files.listed(sorted(images))}")
    return there


def _identity(path: Path) -> str:
    """What all names of one file share: where links lead to, if they do."""
    return rows.printable(os.path.realpath(path) if os.path.exists(path) else str(path))


def _once(
    folder: Path, where: Path, examples: list[Example], unused: Counts, log: rows.Log
) -> list[Example]:
    """Each file once, by its resolved path: the promise is for one image, not for a row of it."""
    first: dict[str, Example] = {}
    for example in examples:
        other = first.setdefault(_identity(folder / example.file), example)
        if other[1:4] != example[1:4]:
            raise DataError(
                f"{where}: {example.place} is there 2 times, see {other.place}, with another label,"
                " user or split; an image has one label"
            )
    if repeated := len(examples) - len(first):
        times = files.counted(repeated, "time")
        log(f"{times} a file is named once more, with the same facts: it counts once")
        unused[MORE_NAMES] += repeated
    return list(first.values())


def _finder(folder: Path, table: Path, images: Sequence[Path]) -> Callable[[str, str], str]:
    """`path as a table has it, where that is -> path in the folder`, else a DataError."""
    top, real = os.path.abspath(folder), os.path.realpath(folder)
    bases = [top, os.path.abspath(table.parent)]
    if Path(bases[1]).is_relative_to(top):
        bases.reverse()  # of a table in the folder of a split, the files beside it are meant
    known = collections.defaultdict[str, set[str]](set)  # names without case, or suffix -> paths

    def key(path: str | Path) -> str:
        return rows.normal(os.path.relpath(path, top)).casefold()

    def find(text: str, where: str) -> str:
        spelled = (text, text.replace("\\", "/"))
        paths = [os.path.normpath(os.path.join(base, x)) for x in spelled for base in bases]
        for path in filter(os.path.isfile, paths):
            resolved = os.path.relpath(os.path.realpath(path), real)
            for file in (resolved, os.path.relpath(path, top)):  # a link may lead elsewhere
                if not file.startswith(".."):
                    return file
        for image in () if known else images:
            for name in (image, image.with_suffix("")):
                known[key(name)].add(rows.printable(str(image.relative_to(folder))))
        meant = sorted(set[str]().union(*(known.get(key(x), ()) for x in paths)))
        if len(meant) == 1:
            return meant[0]
        several = f"; several could be meant: {files.listed(meant)}" if meant else ""
        raise DataError(f"{where}: no file {text[:200]} in {folder}{several}")

    return find


class Tree(NamedTuple):
    """What is below a folder.

    Attributes:
      images: files; a link or folder that leads nowhere is among them, to be left out by its name.
      folders: each once, however many links lead to it.
      ignored: how much of what else there is.
      again: a link to a folder that was walked before -> where.
    """

    images: list[Path]
    folders: list[Path]
    ignored: Counts
    again: dict[Path, Path]


def tree(folder: Path) -> Tree:
    """Images and folders below a folder, in the order of their names."""
    if not folder.is_dir():
        is_file = "a file, not a folder: unpack it" if folder.is_file() else "no such folder"
        raise DataError(f"{folder}: {is_file}")
    listed = Tree([], [], Counts(), {})
    top = Path(os.path.realpath(folder))
    walked = {str(x): folder for x in (top, *top.parents)}
    # Not by recursion, which ends some thousand folders deep.
    places = [iter([folder])]
    while places:
        for path in places[-1]:
            if path != folder and _is_junk(path.name):
                listed.ignored["hidden or of the system"] += 1
            elif os.path.isdir(path):
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
                    places.append(iter(sorted(path.iterdir())))
                except OSError:
                    listed.images.append(path)
                    continue
                break
            elif suffix_of(path.name) in SUFFIXES or not os.path.exists(path):
                listed.images.append(path)
            else:
                listed.ignored[suffix_of(path.name)] += 1
        else:
            places.pop()
    return listed


def _is_junk(name: str) -> bool:
    return name.startswith((".", "~$")) or name.casefold() in JUNK


def suffix_of(name: str) -> str:
    """In lower case, as `READ_BY` has it."""
    last = "".join(Path(name).suffixes[-2:]).lower()
    return last if last in (*READ_BY, *SUFFIXES) else Path(name).suffix.lower() or "no suffix"


def _stem(image: Path) -> str:
    """The name of an image without its suffix, alike for names that look alike."""
    suffix = suffix_of(image.name)
    name = image.name[: -len(suffix)] if image.name.lower().endswith(suffix) else image.name
    return rows.normal(name).casefold()
