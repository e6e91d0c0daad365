"""A folder of one's own images, of any sizes and formats, made into Parquet that `bam` trains on.

Each image is decided by itself: its size, its split and whether it is left out depend on no other,
so that adding or removing a person changes that person's rows alone.
"""

import collections
import concurrent.futures
import csv
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bam import files
from bam.data.common import MAX_PIXELS, DataError
from bam.extras import needs
from bam.files import JsonObject

SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp"}
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")
SHARD = 512  # examples of a file
MANIFEST = "manifest.json"
SPLITS = ("train", "test")
MODES = {1: "L", 3: "RGB"}  # channels -> what Pillow calls them


class Example(NamedTuple):
    """An image file, relative to the folder; "" where a table or a folder does not say."""

    file: str
    label: str
    user: str = ""
    split: str = ""


class Options(NamedTuple):
    """What is made of the images.

    Attributes:
      size: height and width in pixels: the shorter side is resized to it, the middle is cut out.
      channels: 1 (grey) or 3 (colour).
      classes: their names, in the order of the labels; they are public facts.
      test_share: of users, or of images where none are known, that are put in the test split.
      strict: whether a file that cannot be read is an error, rather than left out.
    """

    size: int
    channels: int
    classes: tuple[str, ...]
    test_share: float
    strict: bool


def in_class_folders(folder: Path) -> list[Example]:
    """The images of FOLDER/CLASS/…, or of FOLDER/train/CLASS/… and FOLDER/test/CLASS/….

    DataError for a class without images or with one, which would be known to be in training.
    """
    below = _folders(folder)
    splits = {x.name: _folders(x) for x in below}
    given = set(splits) == set(SPLITS)
    found = [
        Example(str(file.relative_to(folder)), name.name, split=split if given else "")
        for split, names in (splits.items() if given else [("", below)])
        for name in names
        for file in sorted(name.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    names = {x.name for many in (splits.values() if given else [below]) for x in many}
    images = collections.Counter(example.label for example in found)
    for name in sorted(names):
        if images[name] < 2:
            few = "no image" if not images[name] else "one image"
            raise DataError(f"{folder}: class {name} has {few}; a class needs two at least")
    if not found:
        raise DataError(f"{folder}: no folder of a class with images in it")
    return found


def in_table(
    folder: Path, table: Path, columns: dict[str, str], limit: int = 10_000_000
) -> list[Example]:
    """The images that a CSV or Parquet file names, by `columns`: of `Example`'s fields, its own.

    DataError for a column or a file that is not there, a file named twice, a row without a value.
    """
    rows = _rows(table)
    found = []
    for number, row in enumerate(rows, start=1):
        if number > limit:
            raise DataError(f"{table}: more than {limit:,} rows")
        if missing := [name for name in columns.values() if name not in row]:
            raise DataError(f"{table}: no column {missing[0]} among {', '.join(map(str, row))}")
        values = {field: str(row[name] or "") for field, name in columns.items()}
        if "" in values.values():
            raise DataError(f"{table}: row {number} lacks a value")
        path = (folder / values["file"]).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise DataError(f"{table}: row {number}: no file {values['file']} in {folder}")
        found.append(Example(**values))
    if not found:
        raise DataError(f"{table}: has no rows")
    [(file, times)] = collections.Counter(example.file for example in found).most_common(1)
    if times > 1:
        raise DataError(f"{table}: {file} is there {times} times; an image has one label")
    return found


def run(
    folder: Path,
    examples: Sequence[Example],
    out: Path,
    options: Options,
    num_workers: int = 1,
    on_shard: Callable[[int, int], None] = lambda done, num: None,
) -> JsonObject:
    """Writes `train-….parquet`, `test-….parquet` and, last, `manifest.json`, which it returns.

    Files that are there are not made again, so the same call goes on where it was stopped. The same
    input gives the same bytes.

    Args:
      folder: of the images.
      examples: all of them.
      out: folder for the result, its own.
      options: what is made of them.
      num_workers: threads that decode.
      on_shard: called with how many files are written, of how many.

    Raises:
      DataError: for a label that is no class, a user in both splits, a split without images, a
        damaged file if `strict`; or if `out` holds something else.
    """
    check(examples, options)
    shards = _shards(examples, options)
    identity = _digest([options._asdict(), [list(x) for x in examples], _facts(folder, examples)])
    begun = out / "import.json"
    known = files.read_json(begun).get("identity") if begun.is_file() else ""
    if out.exists() and any(out.iterdir()) and known != identity:
        raise DataError(f"{out} holds something else; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(begun, {"identity": identity})
    done, left_out = 0, dict[str, str]()
    with concurrent.futures.ThreadPoolExecutor(max(1, num_workers)) as pool:  # Pillow frees the GIL
        waiting = [
            pool.submit(_write_shard, folder, shard, out / name, options)
            for name, shard in shards.items()
        ]
        try:
            for one in concurrent.futures.as_completed(waiting):
                left_out |= one.result()
                done += 1
                on_shard(done, len(shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    counts = {s: _num_rows(out, s) for s in SPLITS}
    if empty := [split for split in SPLITS if not counts[split]]:
        raise DataError(f"{folder}: no readable image is left for the {empty[0]} split")
    manifest: JsonObject = {
        "classes": list(options.classes),
        "shape": [options.size, options.size, options.channels],
        "num_examples": counts,
        "ids": "user" if examples[0].user else "",
        "left_out": dict(sorted(left_out.items())),
        "files": {name: _digest_of(out / name) for name in sorted(shards)},
    }
    files.write_json(out / MANIFEST, manifest)
    return manifest


def check(examples: Sequence[Example], options: Options) -> None:
    """DataError for labels that are no class, and for users, or a split, in the wrong place."""
    if unknown := {x.label for x in examples} - set(options.classes):
        raise DataError(f"label {min(unknown)!r} is none of the classes {list(options.classes)}")
    if len(set(options.classes)) < max(2, len(options.classes)):
        raise DataError("at least two classes are needed, each once")
    if wrong := {x.split for x in examples} - {"", *SPLITS}:
        raise DataError(f"split {min(wrong)!r} is neither train nor test")
    sides: dict[str, str] = {}
    for example in examples:
        side = _side(example, options.test_share)
        if example.user and sides.setdefault(example.user, side) != side:
            raise DataError(f"user {example.user!r} has images in both splits")


def read_manifest(out: Path) -> JsonObject:
    """The manifest of an imported folder, whose files are as it says; else a DataError."""
    if not (out / MANIFEST).is_file():
        raise DataError(f"{out}: no {MANIFEST}: not imported, or not to its end")
    manifest = files.read_json(out / MANIFEST)
    for name, digest in manifest["files"].items():
        if not (out / name).is_file() or _digest_of(out / name) != digest:
            raise DataError(f"{out / name} is not the file that {MANIFEST} names")
    return manifest


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return sorted(x for x in folder.iterdir() if x.is_dir() and not x.name.startswith("."))


def _rows(table: Path) -> Iterable[dict[str, object]]:
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    if table.suffix == ".parquet":
        with needs("data"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        try:
            rows: list[dict[str, object]] = pq.read_table(table).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{table}: not a readable Parquet file: {error}") from error
        return rows
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}: not a readable CSV file: {error}") from error


def _side(example: Example, test_share: float) -> str:
    """The split of an example: as given, or by a hash of its user, or of its file's name."""
    if example.split:
        return example.split
    digest = hashlib.blake2b((example.user or example.file).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) < test_share * 2**64 else "train"


def _shards(examples: Sequence[Example], options: Options) -> dict[str, list[Example]]:
    """File name -> its examples, in order."""
    found = {}
    for split in SPLITS:
        own = [x for x in examples if _side(x, options.test_share) == split]
        parts = [own[i : i + SHARD] for i in range(0, len(own), SHARD)]
        for number, part in enumerate(parts):
            found[f"{split}-{number:05d}-of-{len(parts):05d}.parquet"] = part
    return found


def _facts(folder: Path, examples: Sequence[Example]) -> list[list[int]]:
    """Sizes and times of the files, by which a change of one is seen."""
    stats = [(folder / x.file).stat() for x in examples]
    return [[x.st_size, x.st_mtime_ns] for x in stats]


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _num_rows(out: Path, split: str) -> int:
    with needs("data"):
        import pyarrow.parquet as pq

    return sum(pq.read_metadata(x).num_rows for x in out.glob(f"{split}-*.parquet"))


def _write_shard(
    folder: Path, shard: Sequence[Example], path: Path, options: Options
) -> dict[str, str]:
    """Writes a file unless it is there; returns what was left out of it, and why."""
    with needs("data"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    if path.exists():
        found = (pq.read_schema(path).metadata or {}).get(b"left_out", b"{}")
        return dict(json.loads(found))
    kept, left_out = [], {}
    for example in shard:
        try:
            kept.append((example, encoded(folder / example.file, options)))
        except DataError as error:
            if options.strict:
                raise
            left_out[example.file] = str(error)
    labels = {"_type": "ClassLabel", "names": list(options.classes)}
    metadata = {
        "huggingface": json.dumps({"info": {"features": {"label": labels}}}),
        "left_out": json.dumps(left_out),
    }
    columns = {
        "image": pa.array([{"bytes": png} for _, png in kept], pa.struct({"bytes": pa.binary()})),
        "label": pa.array([options.classes.index(x.label) for x, _ in kept], pa.int64()),
    }
    if shard[0].user:
        columns["user"] = pa.array([x.user for x, _ in kept], pa.string())
    partial = path.with_suffix(".part")
    pq.write_table(pa.table(columns, metadata=metadata), partial, compression="none")
    partial.rename(path)
    return left_out


def encoded(file: Path, options: Options) -> bytes:
    """An image file as a PNG of the size and channels that are asked for; else a DataError.

    8 and 16 bits, grey, colour, palettes and transparency (on white) are read, turned upright as
    their EXIF says, resized by Lanczos and cut to their middle.
    """
    with needs("data"):
        from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow: sizes are checked here
            with Image.open(file, formats=FORMATS) as opened:
                image: Image.Image = opened
                if image.width * image.height > 8 * MAX_PIXELS:
                    raise ValueError(f"{image.width} × {image.height} pixels are too many")
                if image.mode == "I" or image.mode.startswith("I;16"):
                    image = Image.fromarray(_upper_byte(np.asarray(image)))
                elif image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                    over = image.convert("RGBA")
                    image = Image.new("RGBA", over.size, "white")
                    image.alpha_composite(over)
                elif image.mode == "F":
                    raise ValueError("of floating-point numbers it is not known which is white")
                upright = ImageOps.exif_transpose(image).convert(MODES[options.channels])
                fitted = ImageOps.fit(upright, (options.size,) * 2, Image.Resampling.LANCZOS)
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more.
    except Exception as error:
        raise DataError(f"{file}: {type(error).__name__}: {error}") from error
    written = io.BytesIO()
    fitted.save(written, "PNG")
    return written.getvalue()


def _upper_byte(numbers: np.ndarray) -> np.ndarray:
    """16 bits in 8."""
    if numbers.min() < 0 or numbers.max() >= 2**16:
        raise ValueError("numbers of more than 16 bits")
    return (numbers >> 8).astype(np.uint8)
