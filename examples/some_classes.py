"""Some classes of a data set, to treat a part of the classes as public.

Config: the `dataset` section of `configs/finetune.py`.
"""

import numpy as np

from bam.data import datasets


def some_classes(of, classes, source=None, path=None):
    """The examples of these classes, labelled by the position of the class in the list."""
    data = datasets.load(of, source, path)
    if len(set(classes)) < len(classes) or not set(classes) <= set(range(data.num_classes)):
        raise ValueError(f"classes {classes} of {of} are not some of 0 to {data.num_classes - 1}")
    label = np.full(data.num_classes, -1, np.int32)
    label[list(classes)] = np.arange(len(classes))

    def part(split):
        rows = np.flatnonzero(label[split.labels] >= 0)
        return datasets.Split(split.images[rows], label[split.labels[rows]])

    return data._replace(
        name=f"{of}, classes {', '.join(map(str, classes))}",
        train=part(data.train),
        test=part(data.test),
        num_classes=len(classes),
    )
