"""Warns of what ε cannot see: one picture or person that counts as two, and too few images."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from scipy import sparse, spatial

from bam.data.common import DataError
from bam.data.preprocessing import Target
from bam.images import importing, pixels
from bam.images.listing import Example
from bam.text import have, plural

FEW = 10  # test images of a class; with fewer its figures are mostly chance
LARGE = 30  # a label beyond it is hardly reached by a few hundred clipped steps
ALIKE = 8  # largest difference (255: black to white) between pixels of pictures that look alike


def lines(
    folder: Path,
    examples: Sequence[Example],
    options: importing.Options,
    near: bool,
    pool: Executor,
) -> list[str]:
    """Returns warnings about a list of images.

    They hold counts and are marked NOT PRIVATE. They report identical files (with `near`, also
    pictures that look alike) in both splits or with two users or labels; a user with most of the
    images; and classes with few test images.
    """
    split = [importing.split_of(x, options.test_share) for x in examples]
    users, labels = [x.user for x in examples], [x.label for x in examples]
    kinds = {"identical files": _same_bytes([folder / x.file for x in examples], pool)}
    if near:
        kinds["they look alike"] = _alike(folder, examples, options, pool)
    warnings = []
    attributes = {
        "in training and in test": split,
        "of several users": users,
        "with several labels": labels,
    }
    for kind, groups in kinds.items():
        for difference, values in attributes.items():
            if num := sum(len({values[x] for x in group}) > 1 for group in groups):
                warnings.append(f"{have(num, 'picture')} copies {difference} ({kind})")
        if groups and not users[0]:
            num = sum(map(len, groups)) - len(groups)
            copies = "1 picture is a copy" if num == 1 else f"{num:,} pictures are copies"
            warnings.append(f"{copies} ({kind}); ε protects one of the copies, not all")
    images = Counter(zip(labels, split, strict=True))
    small = [x for x in options.classes if images[x, "test"] < FEW or not images[x, "train"]]
    if small and options.kind == "class":
        counts = ", ".join(
            f"{x} ({images[x, 'train']:,} to train, {images[x, 'test']:,} to test)"
            for x in small[:12]
        ) + (", …" if small[12:] else "")
        classes_have = have(len(small), "class")
        is_hashed = not any(x.split for x in examples)
        units = importing.units_of_classes(examples)
        least = min(len(units.get(x, ())) for x in options.classes)
        num = min(FEW, max(1, least // 5))
        taken = plural(num, "user") if users[0] else f"{num}"
        remedy = f"; --stratify={num} takes {taken} of each class"
        remedy *= is_hashed and least > 1
        warnings.append(
            f"{classes_have} fewer than {FEW} test images, or no training image: {counts}; see "
            f"figures by class (bam report), not accuracy alone{remedy}"
        )
    target = Target(*(options.preprocessing.target or ()))
    numbers = [target.to_label(float(x)) for x in labels if options.kind == "number"]
    if max(map(abs, numbers), default=0) > LARGE:
        # Not how far: the two numbers are published, and this one is somebody's.
        warnings.append(
            f"labels lie beyond {LARGE}, and a network that begins near 0 learns them slowly: give "
            "other --target_offset and --target_scale, numbers near the mean and the spread that "
            "you know from elsewhere, because they are published"
        )
    warnings = [f"NOT PRIVATE: {x}" for x in warnings + _user_warnings(examples)]
    if not users[0]:
        warnings.append(
            "No users are named, so ε protects one image. A person with several is protected less "
            "(docs/users.md)"
        )
    return warnings


def _same_bytes(paths: Sequence[Path], pool: Executor) -> list[list[int]]:
    """Groups the numbers of the files that have the same bytes.

    Reads only files of equal size.
    """
    readable = [i for i, x in enumerate(paths) if os.path.isfile(x) and os.access(x, os.R_OK)]
    sizes = {i: size for i in readable if (size := paths[i].stat().st_size)}
    times = Counter(sizes.values())
    candidates = [i for i, size in sizes.items() if times[size] > 1]
    return _group(candidates, pool.map(importing.sha256, [paths[i] for i in candidates]))


def _alike(
    folder: Path, examples: Sequence[Example], options: importing.Options, pool: Executor
) -> list[list[int]]:
    """Numbers of the examples in groups that look alike at 8 × 8 grey pixels."""
    grey = options.preprocessing._replace(size=(8, 8), channels=1)

    def small(example: Example) -> np.ndarray | None:
        try:
            return pixels.decode(folder / example.file, grey).ravel()
        except DataError:
            return None

    read = {i: x for i, x in enumerate(pool.map(small, examples)) if x is not None}
    if not read:
        return []
    pictures = np.stack(list(read.values()))
    # The tree gives four neighbours a picture, so equal pictures would crowd out those alike.
    different, inverse = np.unique(pictures, axis=0, return_inverse=True)
    tree, num = spatial.KDTree(different.astype(np.float32)), len(different)
    near = tree.query(tree.data, k=4, p=np.inf, distance_upper_bound=ALIKE + 0.5)[1].ravel()
    source, is_near = np.repeat(np.arange(num), 4), near < num  # `num` marks a missing neighbour
    pairs = sparse.coo_array((is_near[is_near], (source[is_near], near[is_near])), (num, num))
    group = sparse.csgraph.connected_components(pairs, directed=False)[1]
    return _group(list(read), group[inverse.ravel()].tolist())


def _group(numbers: Sequence[int], keys: Iterable[object]) -> list[list[int]]:
    """Returns groups of two or more numbers with the same key."""
    groups = defaultdict[object, list[int]](list)
    for number, key in zip(numbers, keys, strict=True):
        groups[key].append(number)
    return [x for x in groups.values() if len(x) > 1]


def _user_warnings(examples: Sequence[Example]) -> list[str]:
    """Warnings of users that may be one person, and of a user with most of the images."""
    images = Counter(x.user for x in examples if x.user)
    warnings, ways = [], {(x.user, x.written) for x in examples if x.user}
    if several := sum(num > 1 for num in Counter(user for user, _ in ways).values()):
        are = f"{plural(several, 'user')} {'is' if several == 1 else 'are'}"
        warnings.append(f"{are} written in several ways, as 12 and 0012 are (docs/users.md)")
    if same := len(images) - len(set(map(_look, images))):
        num = plural(same, "user")
        warnings.append(f"{num} spelled like another but for case or spaces: the same person?")
    if (most := max(images.values(), default=0)) > len(examples) / 2:
        sums = {k: sum(min(k, x) for x in images.values()) for k in (1, 4, 16, 64)}
        warnings.append(
            f"one user has {most:,} of {len(examples):,} images; --config.dataset.group_size=K "
            f"keeps {', '.join(f'{num:,} images for K={k}' for k, num in sums.items())}"
        )
    return warnings


def _look(user: str) -> str:
    """An id without case, white space, and differences such as that of "1" and a wide "１"."""
    text = unicodedata.normalize("NFKC", user).casefold()
    return "".join(x for x in text if x.isprintable() and not x.isspace())
