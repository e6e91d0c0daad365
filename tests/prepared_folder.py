"""A data set as tensorflow-datasets prepares it, made without TensorFlow."""

import io
from pathlib import Path

import tensorflow_datasets as tfds
from PIL import Image

from bam.data.catalogue import DATASETS


def write(name, train, test, path):
    """The folder `path/NAME/VERSION` of a data set of the catalogue."""
    stock, version = DATASETS[name], "0.1.0" if name == "imagenet32" else "3.0.2"
    base, _, config = stock.tfds.partition("/")
    splits = {"train": train, stock.test_split: test}
    features = {
        "id": tfds.features.Text(),
        "image": tfds.features.Image(shape=train.images.shape[1:]),
        "label": tfds.features.ClassLabel(num_classes=stock.num_classes),
    }

    def examples(split):
        for row, (image, label) in enumerate(zip(*splits[split][:2], strict=True)):
            png = io.BytesIO()
            Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(png, "PNG")
            yield (
                row,
                {
                    "id": f"{split}_{row:05d}",
                    "image": io.BytesIO(png.getvalue()),
                    "label": int(label),
                },
            )

    # tfds.dataset_builders.store_as_tfds_dataset would import TensorFlow; this class does not.
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version=version)] if config else []

        def _info(self):
            described = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=described, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {split: examples(split) for split in splits}

        def _generate_examples(self):
            """Never called: the splits are given as iterators."""

    Builder.name = base
    Builder(data_dir=path, file_format="array_record").download_and_prepare()
    return next((Path(path) / stock.tfds).glob("*/dataset_info.json")).parent
