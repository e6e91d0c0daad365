"""Some classes of a data set: say those that are public, apart from those that are private.

Config: the `dataset` section of `configs/finetune.py`.
"""

import numpy as np

from bam.data import datasets


def some_classes(of, classes, source=None, path=None):
    """The examples of these classes alone; their labels are the places in the list, from 0 on."""
    whole = datasets.load(of, source, path)
    if len(set(classes)) < len(classes) or not set(classes) <= set(range(whole.num_classes)):
        raise ValueError(f"classes {classes} of {of} are not some of 0 to {whole.num_classes - 1}")
    label = np.full(whole.num_classes, -1, np.int32)
    label[list(classes)] = np.arange(len(classes))

    def part(split):
        rows = np.flatnonzero(label[split.labels] >= 0)
        return datasets.Split(split.images[rows], label[split.labels[rows]])

    return whole._replace(
        name=f"{of}, classes {', '.join(map(str, classes))}",
        train=part(whole.train),
        test=part(whole.test),
        num_classes=len(classes),
    )
