"""What ε does not see: the same picture, or the same person, in places that count as different."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from scipy import sparse, spatial

from bam import files
from bam.data.common import DataError
from bam.data.preprocessing import Target
from bam.images import importing, pixels
from bam.images.listing import Example

FEW = 10  # test images of a class, below which its figures are mostly chance
LARGE = 30  # a label that a few hundred clipped steps hardly reach
ALIKE = 8  # of 255: the most by which a pixel differs of two pictures that look alike


def lines(
    folder: Path,
    examples: Sequence[Example],
    options: importing.Options,
    near: bool,
    pool: Executor,
) -> list[str]:
    """Warnings about a list of images: counts alone, marked NOT PRIVATE.

    They are of files with the same bytes (if `near`, of pictures that look alike, too) in both
    splits or of two users, of users with most of the images, and of classes with few to test on.
    """
    split = [importing.split_of(x, options.test_share) for x in examples]
    users, labels = [x.user for x in examples], [x.label for x in examples]
    kinds = {"identical files": _same_bytes([folder / x.file for x in examples], pool)}
    if near:
        kinds["they look alike"] = _alike(folder, examples, options, pool)
    warnings = []
    places = {
        "both in training and in test": split,
        "of more than one user": users,
        "of more than one label": labels,
    }
    for kind, groups in kinds.items():
        for where, own in places.items():
            if num := sum(len({own[x] for x in group}) > 1 for group in groups):
                pictures = "1 picture is" if num == 1 else f"{num:,} pictures are"
                warnings.append(f"{pictures} {where} ({kind})")
        if groups and not users[0]:
            num = sum(map(len, groups)) - len(groups)
            copies = "1 picture is a copy" if num == 1 else f"{num:,} pictures are copies"
            warnings.append(f"{copies} ({kind}); ε protects one of the copies, not all")
    images = Counter(zip(labels, split, strict=True))
    few = [x for x in options.classes if images[x, "test"] < FEW or not images[x, "train"]]
    if few and options.kind == "class":
        shown = ", ".join(
            f"{x} ({images[x, 'train']:,} to train, {images[x, 'test']:,} to test)"
            for x in few[:12]
        ) + (", …" if few[12:] else "")
        have = files.have(len(few), "class")
        is_drawn = not any(x.split for x in examples)
        least = min(images[x, "train"] + images[x, "test"] for x in options.classes)
        num = min(FEW, max(1, least // 5))
        choose = f"; --stratify={num} takes so many of each class" if is_drawn and least > 1 else ""
        warnings.append(
            f"{have} fewer than {FEW} test images, or no training image: {shown}; see figures by "
            f"class (bam report), not accuracy alone{choose}"
        )
    target = Target(*(options.preprocessing.target or ()))
    numbers = [target.learned(float(x)) for x in labels if options.kind == "number"]
    if (most := max(map(abs, numbers), default=0)) > LARGE:
        warnings.append(
            f"labels reach {most:,.4g}: a network begins near 0 and takes short steps, so give "
            "--target_offset and --target_scale: public numbers near their mean and their spread"
        )
    warnings = [f"NOT PRIVATE: {x}" for x in warnings + _user_warnings(users)]
    if not users[0]:
        warnings.append(
            "No users are named, so ε protects one image. A person with several is protected less "
            "(docs/users.md)"
        )
    return warnings


def _same_bytes(paths: Sequence[Path], pool: Executor) -> list[list[int]]:
    """Files in groups of the same bytes; where sizes differ nothing is read."""
    there = [i for i, x in enumerate(paths) if os.path.isfile(x) and os.access(x, os.R_OK)]
    sizes = {i: size for i in there if (size := paths[i].stat().st_size)}
    times = Counter(sizes.values())
    several = [i for i, size in sizes.items() if times[size] > 1]
    return _grouped(several, pool.map(importing.sha256, [paths[i] for i in several]))


def _alike(
    folder: Path, examples: Sequence[Example], options: importing.Options, pool: Executor
) -> list[list[int]]:
    """Examples in groups that look alike at 8 × 8 grey pixels."""
    grey = options.preprocessing._replace(size=(8, 8), channels=1)

    def small(example: Example) -> np.ndarray | None:
        try:
            return pixels.decoded(folder / example.file, grey).ravel()
        except DataError:
            return None

    read = {i: x for i, x in enumerate(pool.map(small, examples)) if x is not None}
    if not read:
        return []
    pictures = np.stack(list(read.values()))
    different, which = np.unique(pictures, axis=0, return_inverse=True)
    tree, num = spatial.KDTree(different.astype(np.float32)), len(different)
    near = tree.query(tree.data, k=4, p=np.inf, distance_upper_bound=ALIKE + 0.5)[1].ravel()
    own, is_near = np.repeat(np.arange(num), 4), near < num
    pairs = sparse.coo_array((is_near[is_near], (own[is_near], near[is_near])), (num, num))
    group = sparse.csgraph.connected_components(pairs, directed=False)[1]
    return _grouped(list(read), group[which.ravel()].tolist())


def _grouped(numbers: Sequence[int], keys: Iterable[object]) -> list[list[int]]:
    groups = defaultdict[object, list[int]](list)
    for number, key in zip(numbers, keys, strict=True):
        groups[key].append(number)
    return [x for x in groups.values() if len(x) > 1]


def _user_warnings(users: Sequence[str]) -> list[str]:
    """Of users who have most of the images, or who may be one."""
    images = Counter(filter(None, users))
    warnings = []
    if same := len(images) - len({" ".join(x.casefold().split()) for x in images}):
        warnings.append(f"users that differ from another in case or spaces alone: {same:,}")
    if (most := max(images.values(), default=0)) > len(users) / 2:
        kept = (f"{k} keeps {sum(min(k, x) for x in images.values()):,}" for k in (1, 4, 16, 64))
        warnings.append(
            f"one user has {most:,} of {len(users):,} images; --config.dataset.group_size="
            f"{', '.join(kept)} of them"
        )
    return warnings
