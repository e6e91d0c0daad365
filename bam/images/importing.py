"""Writes images of any sizes and formats as Parquet files that `bam` trains on.

The size of an image, its split and whether it is left out depend on no other image, so adding or
removing a person changes the rows of that person only.
"""

import concurrent.futures
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam import files
from bam.data.common import MANIFEST, DataError, manifest
from bam.data.preprocessing import Preprocessing, Target
from bam.extras import needs
from bam.files import JsonObject
from bam.images import pixels, rows
from bam.images.listing import SPLITS, Example, Listed
from bam.privacy.user_ids import user_id
from bam.text import plural

with needs("data"):
    import pyarrow as pa
    import pyarrow.parquet as pq

SHARD = 512  # examples in a file
JOURNAL = "import.json"  # the files that are written already
# Keys of a file in import.json.
RECORD = {"sha256", "num_rows", "left_out", "lost", "numbers", "unoriented"}
PRIVATE = 0o600  # permissions of each file
ROW_GROUP = 2**19  # decoded bytes in a row group, the part of a file that is read at once


class Options(NamedTuple):
    """Options of an import.

    Attributes:
      preprocessing: turns a file into pixels.
      classes: public names of the classes, in the order of the labels; for several labels the names
        of the labels; for numbers none.
      test_share: share of the users that go to the test split; of the images, if there are no
        users.
      strict: whether a file that cannot be read is an error; if not, it is left out.
      kind: kind of label: a "class", "several" labels or a "number".
    """

    preprocessing: Preprocessing
    classes: tuple[str, ...]
    test_share: float
    strict: bool
    kind: str = "class"


def run(
    folder: Path,
    examples: Sequence[Example],
    out: Path,
    options: Options,
    num_workers: int = 1,
    on_shard: Callable[[int, int], None] = lambda num_written, num: None,
    on_checked: Callable[[], None] = lambda: None,
) -> JsonObject:
    """Writes `train-….parquet`, `test-….parquet` and then `manifest.json`, which it returns.

    A file whose digest is as written before is not written again, so an interrupted import
    continues if it is called again. Equal input gives equal bytes.

    Args:
      folder: folder of the images.
      examples: all images.
      out: folder for the result and nothing else.
      options: options of the import.
      num_workers: threads that decode.
      on_shard: called with the number of written files and the number of all files.
      on_checked: called after the checks and before anything is written.

    Raises:
      DataError: for a label that is not a class, a user in both splits, a split without images, a
        damaged file if `strict`, and an `out` that holds other files. None of the files of this
        import are left in `out` then.
      BlockingIOError: if another process imports to `out`.
    """
    options.preprocessing.check()
    check(examples, options)
    shards = _shards(examples, options)
    identity = _identity(folder, examples, options)
    _read_record(out, identity)
    num_animated = pixels.check_ranges([folder / x.file for x in examples], options.preprocessing)
    on_checked()
    # It holds pixels, labels and ids. A folder that was there may be open to others.
    files.make_folder(out, mode=0o700)
    out.chmod(0o700)
    with files.lock(out):
        written = _write_shards(folder, shards, out, identity, options, num_workers, on_shard)
        result = _manifest(examples, options, written, num_animated)
        # Before the last write, which forces the names in the folder to the disk. From now on the
        # journal refuses other imports, and an equal one writes equal bytes.
        (out / files.LOCK).unlink(missing_ok=True)
        files.write_json(out / MANIFEST, result, PRIVATE)
    return result


def _read_record(out: Path, identity: str) -> JsonObject:
    """Returns the record of the same import in `out`, or {} without one.

    Raises DataError if `out` has any other content.
    """
    journal = out / JOURNAL
    record = files.read_json(journal) if journal.is_file() else {}
    # A killed import may leave, besides, its lock and a journal that it had begun to write.
    ours = (files.LOCK, f"{JOURNAL}.*.partial")
    others = [x for x in (out.iterdir() if out.exists() else ()) if not any(map(x.match, ours))]
    if others and record.get("identity") != identity:
        raise DataError(
            f"{out} was imported from other files or with other options: choose another --out"
            if record
            else f"{out} holds other files: choose another --out"
        )
    return record


def _write_shards(
    folder: Path,
    shards: dict[str, list[Example]],
    out: Path,
    identity: str,
    options: Options,
    num_workers: int,
    on_shard: Callable[[int, int], None],
) -> dict[str, JsonObject]:
    """Writes the shards into the locked folder `out` and returns the `RECORD` of each."""
    journal = out / JOURNAL
    recorded = _read_record(out, identity)  # again, because another import may have ended meanwhile
    for partial in out.glob(f"{JOURNAL}.*.partial"):
        partial.unlink()
    for name in (*shards, MANIFEST):  # a file that stays may be open to others, too
        if (out / name).is_file():
            (out / name).chmod(PRIVATE)
    # A file is written again if an older bam recorded fewer keys of it.
    is_complete = lambda name, x: x.keys() >= RECORD and _has(out / name, x["sha256"])  # noqa: E731
    written = {name: x for name, x in recorded.get("files", {}).items() if is_complete(name, x)}
    files.write_json(journal, {"identity": identity, "files": written}, PRIVATE)
    with concurrent.futures.ThreadPoolExecutor(max(1, num_workers)) as pool:  # Pillow frees the GIL
        waiting = {
            pool.submit(_write_shard, folder, shard, out / name, options): name
            for name, shard in shards.items()
            if name not in written
        }
        try:
            for one in concurrent.futures.as_completed(waiting):
                written[waiting[one]] = one.result()
                record = {"identity": identity, "files": dict(sorted(written.items()))}
                files.write_json(journal, record, PRIVATE)
                on_shard(len(written), len(shards))
            counts = _num_rows(written)
            if empty := [split for split in SPLITS if not counts[split]]:
                first = sorted(x for y in written.values() for x in y["left_out"].items())[:1]
                why = "".join(f"; {file} ({text.rpartition(': ')[2]})" for file, text in first)
                raise DataError(f"{folder}: no readable image left for the {empty[0]} split{why}")
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, DataError):
                for name in (*shards, journal.name, files.LOCK):
                    (out / name).unlink(missing_ok=True)
                if not os.listdir(out):
                    out.rmdir()
            raise
    return written


def _num_rows(written: dict[str, JsonObject]) -> dict[str, int]:
    """The number of rows in the files of each split."""
    num_rows = [(name.partition("-")[0], x["num_rows"]) for name, x in written.items()]
    return {split: sum(n for s, n in num_rows if s == split) for split in SPLITS}


def _manifest(
    examples: Sequence[Example], options: Options, written: dict[str, JsonObject], num_animated: int
) -> JsonObject:
    """The content of `manifest.json` for files with these records."""
    numbers = [x for record in written.values() for x in record["numbers"]]
    return {
        "classes": list(options.classes),
        "shape": list(options.preprocessing.shape),
        "preprocessing": options.preprocessing.as_json(),
        "num_examples": _num_rows(written),
        "ids": "user" if examples[0].user else "",
        "num_users": len(
            {x.user for x in examples if split_of(x, options.test_share) == "train"} - {""}
        ),
        "first_frames": num_animated,
        "lost": dict(sum((Counter(x["lost"]) for x in written.values()), Counter[str]())),
        "lost_numbers": [min(numbers), max(numbers)] if numbers else [],
        "unoriented": sum(x["unoriented"] for x in written.values()),
        "left_out": dict(sorted(x for y in written.values() for x in y["left_out"].items())),
        "files": {name: written[name]["sha256"] for name in sorted(written)},
    }


def without_other_dicom(
    folder: Path, listed: Listed, all_dicom: bool, log: rows.Log = lambda line: None
) -> Listed:
    """The images without DICOM files that are no plain scans, by `pixels.dicom_type`.

    They are counted. With `all_dicom` they stay. The header of a file decides on it alone.

    Raises:
      DataError: if no image is left, or of a class that a folder names fewer than two.
    """
    types = {x: pixels.dicom_type(folder / x.file) for x in listed.examples}
    counts = Counter(filter(None, types.values()))
    for kind, num in sorted(counts.items()):
        first = min(x.file for x, y in types.items() if y == kind)
        danger = ", which may show a patient's name" * (kind == pixels.BURNT_IN)
        done = "imported by --all_dicom" if all_dicom else "left out; --all_dicom imports them"
        num_files = plural(num, "DICOM file")
        log(f"NOT PRIVATE: {num_files} ({kind}{danger}), as {first}: {done}")
    if all_dicom or not counts:
        return listed
    rest = [x for x in listed.examples if not types[x]]
    images = Counter(x.label for x in rest)
    few = sorted(
        {x.label for x in listed.examples if types[x] and not x.row and images[x.label] < 2}
    )
    if few or not rest:
        kinds = ", ".join(f"{num:,} {kind}" for kind, num in sorted(counts.items()))
        of_class = f" of class {few[0]}" * bool(few)
        left = "one image" if few and images[few[0]] else "no image"
        raise DataError(f"{folder}: {left}{of_class} is left without {kinds}: add --all_dicom")
    return listed._replace(examples=rest, unused=listed.unused + counts)


def check(examples: Sequence[Example], options: Options) -> None:
    """DataError for wrong labels, an empty split, and users who are missing or in both splits.

    If one image names a user, all must: the others would together count as one user.
    """
    _check_labels(examples, options)
    if wrong := {x.split for x in examples} - {"", *SPLITS}:
        raise DataError(f"split {min(wrong)!r} is neither train nor test")
    sides: dict[str, tuple[str, str]] = {}
    have_users = any(x.user for x in examples)
    for example in examples:
        side = split_of(example, options.test_share)
        if have_users and not user_id(example.user):
            instead = f" but {example.user!r}" if example.user else ""
            raise DataError(
                f"{example.place} has no user{instead}, but others have: name it, or remove the "
                "image"
            )
        other, place = sides.setdefault(_unit(example), (side, example.place))
        if other != side:
            raise DataError(
                f"user {example.user!r} has images in both splits, {place} ({other}) and "
                f"{example.place} ({side}): put all in one"
            )
    if empty := set(SPLITS) - {side for side, _ in sides.values()}:
        why = "there is only one user" if len(sides) == 1 else f"--test={options.test_share}"
        raise DataError(f"no image is left for the {min(empty)} split: {why}")
    if options.kind == "class" and len({x.label for x in examples}) < 2:
        raise DataError(f"all images have the label {examples[0].label!r}: two classes are needed")


def _check_labels(examples: Sequence[Example], options: Options) -> None:
    names, different = list(options.classes), len(set(options.classes))
    if different < len(names) or (options.kind == "class" and different < 2):
        needed = "two or more classes are needed, each once"
        raise DataError(f"{needed}, not {names}: set --classes=A,B,…")
    why = {label: _wrong(label, options) for label in {x.label for x in examples}}
    wrong = [x for x in examples if why[x.label]]
    if wrong:
        more = f" ({len(wrong):,} labels are wrong)" if wrong[1:] else ""
        first = wrong[0]
        raise DataError(f"{first.place}: label {first.label!r} {why[first.label]}{more}")


def _wrong(label: str, options: Options) -> str:
    """The fault of a label, or ""."""
    names = list(options.classes)
    if options.kind == "class" and label not in names:
        parts = re.split(r"\s*[|;]\s*", label)
        several = ", which have one label an image: give a column of zeros and ones for each class"
        is_several = len(parts) > 1 and any(x in names for x in parts)
        return f"is not one of the classes {names}{several * is_several}"
    if options.kind == "number" and not _finite(label):
        others = dict.fromkeys((label.replace(",", "."), rows.without_thousands(label)))
        hint = " or ".join(filter(_finite, others))
        return f"is not a finite number{hint and ': write '}{hint}"
    if options.kind == "number" and not math.isfinite(_number(label, options)):
        return "is too large for float32: set --target_offset and --target_scale"
    values = label.split(",")
    if options.kind == "several" and not (len(values) == len(names) and {*values} <= {"0", "1"}):
        is_other = len(values) == len(names)
        hint = "; --map=yes:1,no:0 converts other words, and --map=-1:0 numbers" if is_other else ""
        return f"is not a 0 or 1 for each of {names}{hint}"
    return ""


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(label: str, options: Options) -> float:
    """The number that a network learns: the label in the units of its target, as float32."""
    target = Target(*(options.preprocessing.target or ()))
    with np.errstate(over="ignore"):
        return float(np.float32(target.to_label(float(label))))


def read_manifest(out: Path) -> JsonObject:
    """Returns the manifest of an imported folder.

    Raises DataError if there is none, or if a file differs from it.
    """
    if not (record := manifest(out)):
        raise DataError(f"{out} has no {MANIFEST}: run bam data import FOLDER --out={out}")
    for name, digest in record["files"].items():
        if not _has(out / name, digest):
            raise DataError(f"{out / name} is not the file that {MANIFEST} lists: import again")
    return record


def split_of(example: Example, test_share: float) -> str:
    """Returns the split of an example.

    An example without one gets it by a hash of its user, or of its file name.
    """
    if example.split:
        return example.split
    return "test" if _hash(_unit(example)) < test_share * 2**64 else "train"


def stratify(examples: Sequence[Example], num_test: int) -> list[Example]:
    """Puts `num_test` images of each class, those with the smallest hashes, in the test split.

    With users, `num_test` users; a user belongs to the class of most of its images. `num_test` is
    public, and a hash depends on one image or user only. So adding or removing one moves at most
    one other between the splits, and the training set changes by one, as ε assumes. With a share of
    the images in place of a number, a second one could move.

    Raises:
      DataError: for examples that have a split, and for a class without any left to train on.
    """
    if any(x.split for x in examples):
        raise DataError("the images have a test split: leave out --stratify")
    test = set[str]()
    for label, units in sorted(units_of_classes(examples).items()):
        if len(units) <= num_test:
            kind = "users" if examples[0].user else "images"
            raise DataError(
                f"class {label} has {len(units):,} {kind}: --stratify={num_test} leaves none to "
                "train on"
            )
        test.update(sorted(units, key=_hash)[:num_test])
    return [x._replace(split="test" if _unit(x) in test else "train") for x in examples]


def units_of_classes(examples: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the users of each class, or the images if there are no users.

    A user belongs to the class of most of its images.
    """
    counts: dict[str, Counter[str]] = {}
    for example in examples:
        counts.setdefault(_unit(example), Counter())[example.label] += 1
    units: dict[str, list[str]] = {}
    for unit, labels in counts.items():
        units.setdefault(min(labels, key=lambda x: (-labels[x], x)), []).append(unit)
    return units


def _unit(example: Example) -> str:
    """The unit that a split never divides: the user, or without users the image."""
    return example.user or example.file


def _hash(unit: str) -> int:
    """64 bits that depend on this unit only."""
    return int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=8).digest())


def _shards(examples: Sequence[Example], options: Options) -> dict[str, list[Example]]:
    """File name -> its examples, in order."""
    shards = {}
    for split in SPLITS:
        members = [x for x in examples if split_of(x, options.test_share) == split]
        parts = [members[i : i + SHARD] for i in range(0, len(members), SHARD)]
        for number, part in enumerate(parts):
            shards[f"{split}-{number:05d}-of-{len(parts):05d}.parquet"] = part
    return shards


def _identity(folder: Path, examples: Sequence[Example], options: Options) -> str:
    """A hash of options, examples, and the files' sizes and times, which show that one changed."""
    paths = [folder / x.file for x in examples]
    stats = [x.stat() for x in paths if os.path.exists(x)]
    versions = [[x.st_size, x.st_mtime_ns] for x in stats]
    rows = [list(x[:5]) for x in examples]  # how a user's id is written makes no difference
    content = json.dumps([options._asdict(), rows, versions])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def sha256(file: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _has(file: Path, digest: str) -> bool:
    """Whether a file exists and has this digest."""
    return file.is_file() and sha256(file) == digest


def _write_shard(
    folder: Path, shard: Sequence[Example], path: Path, options: Options
) -> JsonObject:
    """Writes a Parquet file and returns its `RECORD`.

    The record says why images are left out.
    """
    pictures, left_out, lost = [], dict[str, str](), Counter[str]()
    numbers, num_unoriented = list[float](), 0
    for example in shard:
        try:
            picture = encode(folder, example, options)
            pictures.append((example, picture.png))
            lost[picture.lost] += 1
            numbers += picture.numbers or ()
            num_unoriented += picture.is_unoriented
        except DataError as error:
            if options.strict:
                raise
            # Without the folder, which may be the temporary copy of an archive.
            file = " ".join(str(folder / example.file).split())  # as an error spells it
            left_out[example.file] = str(error).replace(file, example.file)
    write([x for _, x in pictures], [x for x, _ in pictures], path, options)
    return {
        "sha256": sha256(path),
        "num_rows": len(pictures),
        "left_out": left_out,
        "lost": {kind: num for kind, num in sorted(lost.items()) if kind},
        "numbers": [min(numbers), max(numbers)] if numbers else [],
        "unoriented": num_unoriented,
    }


def encode(folder: Path, example: Example, options: Options) -> pixels.Encoded:
    """Returns the image of an example as a PNG, after the options' preprocessing.

    Raises DataError if that is impossible.
    """
    file = folder / example.file
    if not (os.path.isfile(file) and os.access(file, os.R_OK)):  # opening a pipe would wait
        is_utf8 = "\\udc" not in example.file
        why = "not a readable file" if is_utf8 else "the name is not UTF-8"
        raise DataError(f"{file}: {why}")
    return pixels.encode(file, options.preprocessing)


def write(pngs: Sequence[bytes], examples: Sequence[Example], path: Path, options: Options) -> None:
    """Writes a Parquet file with encoded images, their labels and, if there are any, users."""
    class_label = {"_type": "ClassLabel", "names": list(options.classes)}
    info = {"info": {"features": {"label": class_label} if options.kind == "class" else {}}}
    metadata = {"huggingface": json.dumps(info)}
    columns = {
        "image": pa.array([{"bytes": png} for png in pngs], pa.struct({"bytes": pa.binary()})),
        "label": _labels([x.label for x in examples], options),
    }
    if any(x.user for x in examples):
        columns["user"] = pa.array([x.user for x in examples], pa.string())
    partial = path.with_suffix(".part")
    # A file that a crash left would keep its permissions, which may be wider.
    partial.unlink(missing_ok=True)
    # Small row groups, because a streamed data set reads the whole group of each image.
    group_size = max(1, ROW_GROUP // math.prod(options.preprocessing.shape))
    opener = lambda name, flags: os.open(name, flags, PRIVATE)  # noqa: E731
    with files.naming(path), open(partial, "xb", opener=opener) as file:
        pq.write_table(
            pa.table(columns, metadata=metadata), file, compression="none",
            row_group_size=group_size, use_dictionary=["label", "user"],
        )  # fmt: skip
    files.replace(partial, path)


def _labels(labels: list[str], options: Options) -> Any:
    """The column of labels: an int64 a class, a float32 a number, int8 [num_labels] for several."""
    if options.kind == "class":
        return pa.array([options.classes.index(x) for x in labels], pa.int64())
    if options.kind == "number":
        return pa.array([_number(x, options) for x in labels], pa.float32())
    zeros_and_ones = pa.list_(pa.int8(), len(options.classes))
    return pa.array([[int(x) for x in label.split(",")] for label in labels], zeros_and_ones)
