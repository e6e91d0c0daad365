"""Tells masks, which lie beside images and are none, by the names of files and folders."""

import collections
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from bam.data.common import DataError
from bam.images import rows

_WORDS = (
    r"masks?|(?:d|prob)?segs?|segmented|segmentations?(?:class|object)?|superpixels?|trimaps?"
    r"|ground[\W_]?truths?|annotations?|labels?(?:t[rs])?"
)
DERIVATIVES = "derivatives"  # BIDS: what was computed from the scans, masks and copies
_GT = r"gts?"
# A whole word of a file's name: letters and digits before or behind it make another word.
_IN_FILE = re.compile(rf"(?<![^\W_])(?:{_WORDS}|{_GT})(?=(?:[\W_]?\d+)?(?![^\W_]))")
# A number may follow, but not "gt", which with a number may be a person's code; and a format.
_FOLDER = re.compile(
    rf"(.*[\W_])?(?:{_GT}|(?:{_WORDS}|{DERIVATIVES})(?:[\W_]?v?\d+)?)"
    r"(?:[\W_](?:png|jpe?g|tiff?|bmp|gif|nii))?",
    re.S,
)
IMAGES = {
    "image", "images", "img", "imgs", "imagestr", "imagests", "jpegimages", "original",
    "originals", "photos", "photographs", "pictures", "scans",
}  # fmt: skip
_VOLUMES = (".nii", ".nii.gz")
LEAST_PARTNERS = 3  # images that are named like another and one word


def beside_images(images: Sequence[tuple[Path, str, str]]) -> dict[Path, list[list[Path]]]:
    """Each file that is named as a mask of images in the same folder, and lists of these images.

    An image `x` may have the masks `x_mask`, `x_seg_2` or `mask_x`, and `image_x` the mask
    `mask_x`. Volumes of one person share a beginning, so `sub-01_seg` and `sub-01_desc-brain_mask`
    are masks beside `sub-01_T1w`.

    Args:
      images: the path, the stem (in lower case and composed characters) and the suffix of each
        file.
    """
    files = [(path, str(path.parent), stem, suffix in _VOLUMES) for path, stem, suffix in images]
    names = collections.defaultdict[tuple[str, str], list[Path]](list)
    beginnings = collections.defaultdict[tuple[str, str], list[Path]](list)
    for path, place, stem, is_volume in files:
        names[place, _plain(stem)].append(path)
        if is_volume and not any(_ends_name(stem, word) for word in _IN_FILE.finditer(stem)):
            for beginning in _beginnings(stem):
                beginnings[place, beginning].append(path)
    masks = dict[Path, list[list[Path]]]()
    for path, place, stem, is_volume in files:
        of_images = [names.get((place, x), []) for x in _image_names(stem)]
        if is_volume:
            of_images += [beginnings.get((place, x), []) for x in _persons(stem)]
        if any(of_images):
            masks[path] = of_images
    return masks


def with_partners(stems: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the names that are another's name and one common word, if most names have such one.

    With `x_lesion` beside nine in ten `x`, all `_lesion` may be masks, in whatever language.

    Args:
      stems: the folder and the name, without its suffix and in lower case, of each image.
    """
    names, words = set(stems), collections.defaultdict[str, list[tuple[str, str]]](list)
    for place, stem in names:
        match = re.fullmatch(r"(.+?)[\W_]+([^\W\d_]+)", stem, re.S)
        if match and (place, match[1]) in names:
            words[match[2]].append((place, stem))
    num_others = len(names) - sum(map(len, words.values()))
    most = max(words.values(), key=lambda x: (len(x), min(x)), default=[])
    is_common = len(most) >= LEAST_PARTNERS and 10 * len(most) >= 9 * num_others
    return sorted(most) if is_common else []


def has_word(stem: str) -> bool:
    """Whether a file's name, without its suffix and in lower case, has a word for masks."""
    return _IN_FILE.search(stem) is not None


def _ends_name(stem: str, word: re.Match[str]) -> bool:
    """Whether a word of a name is its last, possibly with a number behind."""
    return re.fullmatch(r"(?:[\W_]?\d+)?", stem[word.end() :]) is not None


def _is_bids(stem: str) -> bool:
    """Whether a name is of keys with values, `sub-01_ses-2_T1w`."""
    return stem.startswith("sub-")


def _beginnings(stem: str) -> list[str]:
    """Returns the beginnings of a name, each of whole words.

    A beginning of a name in BIDS never has a key without its value.
    """
    words = stem.split("_") if _is_bids(stem) else _plain(stem).split("_")
    return [_plain("_".join(words[:num])) for num in range(1, len(words) + 1)]


def _image_names(stem: str) -> Iterator[str]:
    """Yields the names that the image of a mask may have.

    There are none for a name without a word for masks.
    """
    for word in _IN_FILE.finditer(stem):
        before, behind = stem[: word.start()], stem[word.end() :]
        number = re.fullmatch(r"[\W_]?\d+", behind)
        names = [before + other + behind for other in ("", "image", "img")]
        yield from filter(None, map(_plain, names + [before] * bool(number)))


def _persons(stem: str) -> Iterator[str]:
    """The beginnings that a mask's name may share with a volume of the same person."""
    for word in _IN_FILE.finditer(stem):
        if _ends_name(stem, word):
            subject = re.match(r"sub-[^_]+(?:_ses-[^_]+)?", stem)  # as BIDS names files
            before = stem[: word.start()]
            is_value = _is_bids(stem) and before.endswith("-")  # as of the person `sub-gt`
            names = ["" if is_value else before, subject[0] if subject else ""]
            yield from filter(None, map(_plain, names))


def _plain(name: str) -> str:
    """A name with one underscore for all that is no letter or digit."""
    return re.sub(r"[\W_]+", "_", name).strip("_")


def is_folder(name: str, only: bool = False) -> bool:
    """Whether a folder's name says that it holds masks.

    With `only`, the name must say it by a word that stands alone.
    """
    match = _FOLDER.fullmatch(rows.normal(name).casefold())
    return match is not None and not (only and match[1])


def folders(
    folder: Path,
    images: Sequence[tuple[str, ...]],
    depth: int,
    named: Collection[str],
    users: bool = False,
) -> set[tuple[str, ...]]:
    """Folders of masks, each by the names of the folders from `folder` to it.

    Above and below the classes the name of a folder decides. Among the classes it may be the name
    of one, so there it decides only beside `images/`, or if the folder repeats the classes.

    Args:
      folder: for errors.
      images: for each image the names of the folders above it.
      depth: the number of names down to the class.
      named: names that are of classes, because the user said so.
      users: whether the folders below the classes are users, whatever they are called.

    Raises:
      DataError: for a class that may be a folder of masks.
    """
    candidates = {x[: i + 1] for x in set(images) for i, name in enumerate(x) if is_folder(name)}
    candidates = {x for x in candidates if not (users and len(x) == depth + 1)}
    is_sure = lambda x: len(x) != depth or x[-1].casefold() == DERIVATIVES  # noqa: E731
    result = {x for x in candidates if is_sure(x) and x[-1] not in named}
    for place in sorted(x for x in candidates - result if x[-1] not in named):
        level = [x for x in images if len(x) >= depth and x[: depth - 1] == place[:-1]]
        siblings = {x[depth - 1] for x in level}
        beside = sorted(x for x in siblings if x.casefold() in IMAGES)
        inside = [x for x in level if x[:depth] == place]
        below = {x[depth] for x in inside if len(x) > depth}
        if all(len(x) > depth for x in inside) and (beside or below <= siblings):
            result.add(place)
        elif beside or is_folder(place[-1], only=True):
            names = f"--classes={','.join(sorted(siblings))}"
            kinds = f"{beside[0]} and {place[-1]}" if beside else place[-1]
            meant = "images and their masks, not classes" if beside else "masks, not a class"
            raise DataError(
                f"{folder.joinpath(*place)}: {kinds} may be {meant}: make FOLDER/CLASS/… of the "
                f"images, without the masks. If they are classes, add {names}"
            )
    return result


def in_folders(images: Sequence[tuple[Path, tuple[str, ...]]]) -> dict[Path, list[list[Path]]]:
    """Each file below a folder named as of masks beside a folder `images`, and lists of the latter.

    Args:
      images: each file, and the names of the folders down to it.
    """
    inside = collections.defaultdict[tuple[str, ...], list[Path]](list)  # parent of `images` -> all
    for path, names in images:
        for number, name in enumerate(names):
            if name.casefold() in IMAGES:
                inside[names[:number]].append(path)
    masks = dict[Path, list[list[Path]]]()
    for path, names in images:
        parents = [names[:i] for i, name in enumerate(names) if is_folder(name)]
        if of_images := [inside[x] for x in parents if x in inside]:
            masks[path] = of_images
    return masks


def is_inside(names: tuple[str, ...], folders: Collection[tuple[str, ...]]) -> bool:
    """Whether a folder, by its names, is one of the `folders` or lies in one."""
    return any(names[:i] in folders for i in range(1, len(names) + 1))
