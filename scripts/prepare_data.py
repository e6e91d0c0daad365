"""Prepares a data set as array_record files, which `load(NAME, "tfds", FOLDER)` reads.

    python -m scripts.prepare_data --name=cifar10 --path=FOLDER --archive=cifar-10-python.tar.gz

converts official files from disk, without a network and without TensorFlow. Without --archive
tensorflow-datasets downloads them; that needs TensorFlow (pip install 'bam[prepare]').
"""

from pathlib import Path

from absl import flags

from bam.data import archives, prepared
from scripts import cli

_NAME = flags.DEFINE_enum("name", None, sorted(prepared.STOCK), "The data set.", required=True)
_PATH = flags.DEFINE_string(
    "path", None, "Folder to write to: tensorflow-datasets' data_dir.", required=True
)
_ARCHIVE = flags.DEFINE_string(
    "archive", None, "Official archive, or folder of official files, to convert."
)


def main() -> None:
    """Prepares what the flags say and prints where."""
    with cli.one_line_errors():
        print(prepare(_NAME.value, Path(_PATH.value).expanduser(), _ARCHIVE.value))


def prepare(name: str, path: Path, archive: str | None = None) -> Path:
    """Prepares one data set.

    Args:
      name: "cifar10", "cifar100", "imagenet32" or "mnist".
      path: the folder to write to.
      archive: official archive, or folder of official files; None: download.

    Returns:
      The folder that now holds the data set.

    Raises:
      DataError: if it is there already, or cannot be read or downloaded. Nothing is left behind.
    """
    if not archive:
        return prepared.download(name, path)
    train, test = archives.read(name, Path(archive).expanduser())
    return prepared.write(name, train, test, path)


if __name__ == "__main__":
    cli.run(main)
