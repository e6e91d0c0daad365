"""Files, JSON above all, written all or nothing and read with errors that name the file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that a config or a command names; `~NOBODY` stays as it is, a path to nothing.

    `Path.expanduser` raises RuntimeError for that.
    """
    return Path(os.path.expanduser(text))


def read_json(path: Path) -> JsonObject:
    """A file's JSON object; ValueError, in one line that names it, for anything else."""
    try:
        return as_object(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged: not UTF-8") from None


def as_object(text: str, path: Path) -> JsonObject:
    """A JSON object in a text of a file; ValueError, in one line, for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"{path} is damaged: not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged, or not of one run: not a JSON object")
    return value


def one_line(value: Any, without: str = "`|") -> Any:
    """A JSON value in whose texts, keys too, spaces stand for what is not printed and `without`.

    For records that may be a stranger's, before they stand in Markdown: a line break, a backtick or
    a bar in them could end a line, a code or a cell, and what follows would pass for our words.
    """
    if isinstance(value, dict):
        return {one_line(key, without): one_line(x, without) for key, x in value.items()}
    if isinstance(value, list):
        return [one_line(x, without) for x in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() and c not in without else " " for c in value)
    return value


def write_json(path: Path, value: object) -> None:
    """Writes strict, indented JSON, all or nothing; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a text file, as `write_bytes` does."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file, all or nothing, whatever crashes, also beside others that write it.

    It has the permissions of `mode`, less those that the umask takes, before it has any content.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # one that a crash left would keep its own permissions
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        to_disk(file)
    partial.replace(path)


def to_disk(file: IO[Any]) -> None:
    """Returns when what was written is on the disk, not in some buffer that a crash empties."""
    file.flush()
    os.fsync(file.fileno())
