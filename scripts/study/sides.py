"""Joins the features of a network's depths in one file, with or without the mean of left and right.

python -m scripts.study.sides --path=runs/study/net_GroupNorm --out=runs/study/net.npy --average
"""

import numpy as np
from absl import flags

from bam.cli import console
from scripts.study.protocol import joined

SIDES = {1: 2, 3: 2, 4: 2, 5: 2, 7: 4}  # depth -> places of its features along a side
_PATH = flags.DEFINE_string("path", "", "path of files PATH_DEPTH_train.npy, without _DEPTH")
_AVERAGE = flags.DEFINE_bool("average", False, "average features of left and right")


def main():
    """Writes the file."""
    names = []
    for depth, side in SIDES.items():
        name = f"{_PATH.value}_{depth}_train.npy"
        if _AVERAGE.value:
            x = np.load(name).astype(np.float32)
            x = x.reshape(len(x), side, side, -1)
            x = (x + x[:, :, ::-1])[:, :, : side // 2] / 2
            name = f"{_PATH.value}_{depth}_sides.npy"
            np.save(name, x.reshape(len(x), -1).astype(np.float16))
        names.append(name)
    np.save(flags.FLAGS.out, joined("+".join(names)))


if __name__ == "__main__":
    console.require("path", "out")
    console.run(main)
