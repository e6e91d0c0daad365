"""Prepares a data set as array_record files, which `load(NAME, "tfds", FOLDER)` reads.

    python -m scripts.prepare_data --name=cifar10 --path=FOLDER --archive=cifar-10-python.tar.gz

converts official files from disk, without a network and without TensorFlow. Without --archive it
says where to fetch them.
"""

from pathlib import Path

from absl import flags

from bam.cli import console
from bam.data.sources import archives, prepared

_NAME = flags.DEFINE_enum("name", None, sorted(prepared.STOCK), "The data set.")
_PATH = flags.DEFINE_string("path", "", "Folder to write to: tensorflow-datasets' data_dir.")
_ARCHIVE = flags.DEFINE_string(
    "archive", None, "Official archive, or folder of official files, to convert."
)
console.require("name", "path")


def main() -> None:
    """Prepares what the flags say and prints where."""
    with console.one_line_errors():
        if not _ARCHIVE.value:
            url = prepared.STOCK[str(_NAME.value)].url
            raise ValueError(
                f"--archive is required: download {url} and name the file or its folder"
            )
        print(prepare(str(_NAME.value), Path(_PATH.value), _ARCHIVE.value))


def prepare(name: str, path: Path, archive: str) -> Path:
    """Prepares one data set from official files, and returns its new folder; all or nothing."""
    train, test = archives.read(name, Path(archive))
    return prepared.write(name, train, test, path)


if __name__ == "__main__":
    console.run(main)
