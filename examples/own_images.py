"""Your own images in Hugging Face's Parquet layout, trained by naming their folder.

python -m examples.own_images

Writes such a folder, as `Dataset.to_parquet` of Hugging Face would, then does in Python what this
command does. Files that do not name their classes need `--config.dataset.num_classes` too: it is
public, and not counted from private labels.

bam train --config=configs/digits.py:bam_sam --workdir=runs/own \
  --config.dataset.name=folder --config.dataset.source=parquet --config.dataset.path=FOLDER
"""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bam.data import datasets
from bam.privacy.accounting import rounded_up
from bam.training import loop
from configs import digits


def write_folder(folder: Path) -> None:
    """Digits as PNG images in `train.parquet` and `test.parquet`, classes named in the schema."""
    data = datasets.load("digits")
    names = [str(digit) for digit in range(10)]
    features = {"label": {"_type": "ClassLabel", "names": names}, "image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    for name, split in (("train", data.train), ("test", data.test)):
        images = [{"bytes": _png(image), "path": None} for image in split.images]
        table = pa.table({"image": images, "label": pa.array(split.labels, pa.int64())})
        pq.write_table(table.replace_schema_metadata(metadata), folder / f"{name}.parquet")


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[..., 0]).save(file, "PNG")
    return file.getvalue()


def main() -> dict:
    """Trains on the folder, by path alone; returns the run's summary."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        config = digits.get_config("bam_sam")
        config.dataset.update({"name": "folder", "source": "parquet", "path": folder})
        config.model.name, config.accountant, config.num_steps = "linear", "rdp", 30
        return loop.train(loop.build(config), seed=0).summary


if __name__ == "__main__":
    summary = main()
    print(
        f"ε = {rounded_up(summary['epsilon'], '.2f')}, test accuracy {summary['test_accuracy']:.1%}"
    )
