"""A folder of one's own images, of any sizes and formats, made into Parquet that `bam` trains on.

Each image is decided by itself: its size, its split and whether it is left out depend on no other,
so that adding or removing a person changes that person's rows alone.
"""

import concurrent.futures
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam import files
from bam.core.user_table import MISSING
from bam.data.common import MANIFEST, DataError, manifest
from bam.data.preprocessing import Preprocessing, Target
from bam.extras import needs
from bam.files import JsonObject
from bam.images import pixels
from bam.images.listing import SPLITS, Example

with needs("data"):
    import pyarrow as pa
    import pyarrow.parquet as pq

SHARD = 512  # examples of a file
NOTED = {"sha256", "num_rows", "left_out", "lost", "numbers"}  # of a file, in import.json
ROW_GROUP = 2**19  # bytes, decoded, of a file's part that is read at once


class Options(NamedTuple):
    """What is made of the images.

    Attributes:
      preprocessing: how a file becomes pixels.
      classes: their names, in the order of the labels; they are public facts. Of several labels,
        the names of these; of a number, none.
      test_share: of users, or of images where none are known, that are put in the test split.
      strict: whether a file that cannot be read is an error, rather than left out.
      kind: what an image has: a "class", "several" labels or a "number".
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
    on_shard: Callable[[int, int], None] = lambda done, num: None,
    on_checked: Callable[[], None] = lambda: None,
) -> JsonObject:
    """Writes `train-….parquet`, `test-….parquet` and, last, `manifest.json`, which it returns.

    Files that are as they were written, by their digests, are not made again, so the same call goes
    on where it was stopped. The same input gives the same bytes.

    Args:
      folder: of the images.
      examples: all of them.
      out: folder for the result, its own.
      options: what is made of them.
      num_workers: threads that decode.
      on_shard: called with how many files are written, of how many.
      on_checked: called before anything is written.

    Raises:
      DataError: for a label that is no class, a user in both splits, a split without images, a
        damaged file if `strict`; or if `out` holds something else. Nothing is left in `out` then.
    """
    options.preprocessing.check()
    check(examples, options)
    shards = _shards(examples, options)
    identity = _identity(folder, examples, options)
    begun = out / "import.json"
    known = files.read_json(begun) if begun.is_file() else {}
    if out.exists() and any(out.iterdir()) and known.get("identity") != identity:
        raise DataError(
            f"{out} was imported from other files or with other options; choose another --out"
            if known
            else f"{out} holds other files; choose another --out"
        )
    several = pixels.check_ranges([folder / x.file for x in examples], options.preprocessing)
    on_checked()
    files.make_folder(out)
    written = known.get("files", {})
    # A file is made again if an older bam wrote it and noted less of it.
    is_known = lambda name, x: x.keys() >= NOTED and _has(out / name, x["sha256"])  # noqa: E731
    done = {name: x for name, x in written.items() if is_known(name, x)}
    files.write_json(begun, {"identity": identity, "files": done})
    with concurrent.futures.ThreadPoolExecutor(max(1, num_workers)) as pool:  # Pillow frees the GIL
        waiting = {
            pool.submit(_write_shard, folder, shard, out / name, options): name
            for name, shard in shards.items()
            if name not in done
        }
        try:
            for one in concurrent.futures.as_completed(waiting):
                done[waiting[one]] = one.result()
                files.write_json(begun, {"identity": identity, "files": dict(sorted(done.items()))})
                on_shard(len(done), len(shards))
            counts = {s: sum(done[x]["num_rows"] for x in done if x.startswith(s)) for s in SPLITS}
            if empty := [split for split in SPLITS if not counts[split]]:
                lost = sorted(x for y in done.values() for x in y["left_out"].items())[:1]
                why = "".join(f"; {file} ({text.rpartition(': ')[2]})" for file, text in lost)
                raise DataError(f"{folder}: no readable image left for the {empty[0]} split{why}")
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, DataError):
                for name in (*shards, begun.name):
                    (out / name).unlink(missing_ok=True)
                if not os.listdir(out):
                    out.rmdir()
            raise
    numbers = [x for facts in done.values() for x in facts["numbers"]]
    facts: JsonObject = {
        "classes": list(options.classes),
        "shape": list(options.preprocessing.shape),
        "preprocessing": options.preprocessing.as_json(),
        "num_examples": counts,
        "ids": "user" if examples[0].user else "",
        "num_users": len(
            {x.user for x in examples if split_of(x, options.test_share) == "train"} - {""}
        ),
        "first_frames": several,
        "lost": dict(sum((Counter(x["lost"]) for x in done.values()), Counter[str]())),
        "lost_numbers": [min(numbers), max(numbers)] if numbers else [],
        "left_out": dict(sorted(x for facts in done.values() for x in facts["left_out"].items())),
        "files": {name: done[name]["sha256"] for name in sorted(done)},
    }
    files.write_json(out / MANIFEST, facts)
    return facts


def check(examples: Sequence[Example], options: Options) -> None:
    """DataError for labels that are no class, and for users, or a split, in the wrong place.

    Where one image names a user, each must: those that do not would together be one user.
    """
    _check_labels(examples, options)
    if wrong := {x.split for x in examples} - {"", *SPLITS}:
        raise DataError(f"split {min(wrong)!r} is neither train nor test")
    sides: dict[str, tuple[str, str]] = {}
    have_users = any(x.user for x in examples)
    for example in examples:
        side = split_of(example, options.test_share)
        if have_users and example.user.strip() in MISSING:
            instead = f" but {example.user!r}" if example.user else ""
            raise DataError(f"{example.place}: has no user{instead}, others have")
        other, place = sides.setdefault(_unit(example), (side, example.place))
        if other != side:
            raise DataError(
                f"user {example.user!r} has images in both splits: {place} ({other}) and "
                f"{example.place} ({side})"
            )
    if empty := set(SPLITS) - {side for side, _ in sides.values()}:
        why = "there is one user alone" if len(sides) == 1 else f"--test is {options.test_share}"
        raise DataError(f"no image is left for the {min(empty)} split: {why}")
    if options.kind == "class" and len({x.label for x in examples}) < 2:
        raise DataError(f"all images have the label {examples[0].label!r}: a model needs two")


def _check_labels(examples: Sequence[Example], options: Options) -> None:
    names, different = list(options.classes), len(set(options.classes))
    if different < len(names) or (options.kind == "class" and different < 2):
        raise DataError(f"at least two classes are needed, each once; these are {names}")
    why = {label: _wrong(label, options) for label in {x.label for x in examples}}
    wrong = [x for x in examples if why[x.label]]
    if wrong:
        more = f" ({len(wrong):,} labels are wrong)" if wrong[1:] else ""
        first = wrong[0]
        raise DataError(f"{first.place}: label {first.label!r} {why[first.label]}{more}")


def _wrong(label: str, options: Options) -> str:
    """What is wrong with a label, or ""."""
    names = list(options.classes)
    if options.kind == "class" and label not in names:
        return f"is none of the classes {names}"
    if options.kind == "number" and not _finite(label):
        hint = f": write {point}" if _finite(point := label.replace(",", ".")) else ""
        return f"is not a finite number{hint}"
    if options.kind == "number" and not math.isfinite(_number(label, options)):
        return "is too large for float32, less --target_offset by --target_scale"
    values = label.split(",")
    if options.kind == "several" and not (len(values) == len(names) and {*values} <= {"0", "1"}):
        is_text = len(values) == len(names) and not all(map(_finite, values))
        hint = "; --map=yes:1,no:0 makes them of others" if is_text else ""
        return f"of {names} is not zeros and ones, one for each{hint}"
    return ""


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(label: str, options: Options) -> float:
    """What is learned of a number: in the units of its target, as float32."""
    target = Target(*(options.preprocessing.target or ()))
    with np.errstate(over="ignore"):
        return float(np.float32(target.learned(float(label))))


def read_manifest(out: Path) -> JsonObject:
    """The manifest of an imported folder, whose files are as it says; else a DataError."""
    if not (facts := manifest(out)):
        raise DataError(f"{out}: no {MANIFEST}: not imported, or not to its end")
    for name, digest in facts["files"].items():
        if not _has(out / name, digest):
            raise DataError(f"{out / name} is not the file that {MANIFEST} names")
    return facts


def split_of(example: Example, test_share: float) -> str:
    """The split of an example: as given, or by a hash of its user, or of its file's name."""
    if example.split:
        return example.split
    return "test" if _hash(_unit(example)) < test_share * 2**64 else "train"


def stratified(examples: Sequence[Example], num_test: int) -> list[Example]:
    """Examples of which, of each class, so many images are for the test: those of least hashes.

    Where users are known they are users, each in the class that most of its own images have. The
    number is public and a hash tells of one image or user alone, so adding or removing one moves at
    most one between the splits: what is trained on changes by one, as ε assumes. A share of those
    that are there would move a second one.

    Raises:
      DataError: for examples that have a split, and a class that would keep none to train on.
    """
    if any(x.split for x in examples):
        raise DataError("the images have a test split; --stratify is for those that have none")
    counts: dict[str, Counter[str]] = {}
    for example in examples:
        counts.setdefault(_unit(example), Counter())[example.label] += 1
    members: dict[str, list[str]] = {}
    for unit, labels in counts.items():
        members.setdefault(min(labels, key=lambda x: (-labels[x], x)), []).append(unit)
    test = set[str]()
    for label, units in sorted(members.items()):
        if len(units) <= num_test:
            what = "users" if examples[0].user else "images"
            raise DataError(
                f"class {label} has {len(units):,} {what}: --stratify={num_test} leaves none to "
                "train on"
            )
        test.update(sorted(units, key=_hash)[:num_test])
    return [x._replace(split="test" if _unit(x) in test else "train") for x in examples]


def _unit(example: Example) -> str:
    """Who is on one side of the split as a whole: a user, or an image where none are known."""
    return example.user or example.file


def _hash(unit: str) -> int:
    """64 bits that tell of this unit alone."""
    return int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=8).digest())


def _shards(examples: Sequence[Example], options: Options) -> dict[str, list[Example]]:
    """File name -> its examples, in order."""
    shards = {}
    for split in SPLITS:
        own = [x for x in examples if split_of(x, options.test_share) == split]
        parts = [own[i : i + SHARD] for i in range(0, len(own), SHARD)]
        for number, part in enumerate(parts):
            shards[f"{split}-{number:05d}-of-{len(parts):05d}.parquet"] = part
    return shards


def _identity(folder: Path, examples: Sequence[Example], options: Options) -> str:
    """A hash of what is asked for, and of sizes and times of the files, which tell of a change."""
    paths = [folder / x.file for x in examples]
    stats = [x.stat() for x in paths if os.path.exists(x)]
    facts = [[x.st_size, x.st_mtime_ns] for x in stats]
    asked = json.dumps([options._asdict(), [list(x) for x in examples], facts])
    return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()


def sha256(file: Path) -> str:
    """The digest of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _has(file: Path, digest: str) -> bool:
    return file.is_file() and sha256(file) == digest


def _write_shard(
    folder: Path, shard: Sequence[Example], path: Path, options: Options
) -> JsonObject:
    """Writes a file; returns its digest and rows, and what was left out of it, and why."""
    kept, left_out, lost = [], dict[str, str](), Counter[str]()
    numbers = list[float]()
    for example in shard:
        try:
            picture = encoded(folder, example, options)
            kept.append((example, picture.png))
            lost[picture.lost] += 1
            numbers += picture.numbers or ()
        except DataError as error:
            if options.strict:
                raise
            # Where the folder is, as a copy of an archive for a time, is no fact of the data.
            file = " ".join(str(folder / example.file).split())  # as an error has it
            left_out[example.file] = str(error).replace(file, example.file)
    write([x for _, x in kept], [x for x, _ in kept], path, options)
    return {
        "sha256": sha256(path),
        "num_rows": len(kept),
        "left_out": left_out,
        "lost": {kind: num for kind, num in sorted(lost.items()) if kind},
        "numbers": [min(numbers), max(numbers)] if numbers else [],
    }


def encoded(folder: Path, example: Example, options: Options) -> pixels.Encoded:
    """An example's image as a PNG, by the options' preprocessing; else a DataError."""
    file = folder / example.file
    if not (os.path.isfile(file) and os.access(file, os.R_OK)):  # a pipe would be waited for
        is_named = "\\udc" not in example.file
        why = "no file that can be read" if is_named else "the name is not UTF-8"
        raise DataError(f"{file}: {why}")
    return pixels.encoded(file, options.preprocessing)


def write(pngs: Sequence[bytes], examples: Sequence[Example], path: Path, options: Options) -> None:
    """Writes a Parquet file of encoded images and what their examples say of them."""
    named = {"_type": "ClassLabel", "names": list(options.classes)}
    facts = {"info": {"features": {"label": named} if options.kind == "class" else {}}}
    metadata = {"huggingface": json.dumps(facts)}
    columns = {
        "image": pa.array([{"bytes": png} for png in pngs], pa.struct({"bytes": pa.binary()})),
        "label": _labels([x.label for x in examples], options),
    }
    if any(x.user for x in examples):
        columns["user"] = pa.array([x.user for x in examples], pa.string())
    partial = path.with_suffix(".part")
    # Small row groups: of a data set that is streamed, an image is read with the whole of its own.
    together = max(1, ROW_GROUP // math.prod(options.preprocessing.shape))
    pq.write_table(
        pa.table(columns, metadata=metadata), partial, compression="none",
        row_group_size=together, use_dictionary=["label", "user"],
    )  # fmt: skip
    files.replace(partial, path)


def _labels(labels: list[str], options: Options) -> Any:
    if options.kind == "class":
        return pa.array([options.classes.index(x) for x in labels], pa.int64())
    if options.kind == "number":
        return pa.array([_number(x, options) for x in labels], pa.float32())
    several = pa.list_(pa.int8(), len(options.classes))
    return pa.array([[int(x) for x in label.split(",")] for label in labels], several)
