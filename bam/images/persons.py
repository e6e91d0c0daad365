"""Refuses folders of persons in the place of classes, because names of classes are published."""

import re
from collections.abc import Sequence
from pathlib import Path

from bam.data.common import DataError
from bam.errors import InputError
from bam.images import pixels
from bam.images.listing import SPLITS, Example, suffix_of
from bam.privacy.user_ids import is_missing, user_id

# Folders may be persons, not classes, if there are MANY with fewer than FEW images on average.
MANY, FEW = 10, 5
LEAST_NAMES = 3  # like those of persons, besides more than half of all names
# Names like those of persons, in lower case. A number from 100 on may be a person's. Smaller ones,
# years, ImageNet's synsets (n01440764) and numbered words for classes are more often classes.
_DAY = r"(?:19|20)\d\d[\W_]?\d\d[\W_]?\d\d|\d\d[\W_]?\d\d[\W_]?(?:19|20)\d\d"
_DATE = rf"(?:19|20)\d\d|{_DAY}"
_CODE = r"(?!(?:19|20)\d\d(?:$|[-_]))\d{3,}"  # not a year
_NAME_OF_PERSON = re.compile(
    r".*\^.*"  # as DICOM writes names
    r"|(?!(?:19|20)\d\d$)\d{3,}"
    r"|(?:patients?|pat|pt|pid|participants?|probands?|persons?|subjects?|subj|sub|cases?|fall|id|p)"
    r"[\W_]*\d+"
    r"|(?:.*[\W_])?(?:patient\w*|subject|volunteer|pa[cz]iente?)[\W_]*\d+\w?"
    r"|sub-\w+"  # as BIDS names folders
    rf"|(?:.*[\W_])?(?:{_DAY})(?:[\W_].*)?"  # of birth
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}"  # UUID, hash
    r"|\d+(?:\.\d+){4,}"  # DICOM's UID
    r"|.+@.+\..+"
    r"|(?!n\d{8}$|(?:class|classe|klasse|label|category|type|grade|grad|stage|level|group)[\W_]?\d)"
    rf"(?:[^\W\d_]+[\W_]?\d{{3,}}|(?:[^\W_]+[-_])+{_CODE}(?:[-_][^\W_]+)*|{_CODE}(?:[-_][^\W_]+)+)"
    rf"|[^\W\d_]+(?:[\W_]+[^\W\d_]+)+[\W_]+(?:{_DATE})",  # Mueller_Hans_1950
    re.S,
)
SAMPLE = 20  # files of a class whose headers are read before the others'
TAGS = ("PatientID", "SeriesInstanceUID")


def check_number(folder: Path, num_classes: int, num_images: int, users: str) -> None:
    """DataError for many folders with few images each.

    `users` is the source of users, as for `listing.in_class_folders`.
    """
    if num_classes >= MANY and num_images < FEW * num_classes:
        raise _refusal(folder, f"{num_classes:,} folders with {num_images:,} images", users)


def check_names(folder: Path, names: Sequence[str], users: str) -> None:
    """DataError if more than half of the folders, and three or more, are named like persons."""
    alike = [x for x in names if _NAME_OF_PERSON.fullmatch(x.strip().casefold())]
    if len(alike) >= LEAST_NAMES and 2 * len(alike) > len(names):
        why = f"{len(alike):,} of {len(names):,} folders are named like persons, as {alike[0]}"
        raise _refusal(folder, why, users)


def check_sides(folder: Path, examples: Sequence[Example], users: str) -> None:
    """DataError if folders divide the images into splits, and no class is in both of them."""
    classes = [{x.label for x in examples if x.split == split} for split in SPLITS]
    if all(classes) and not classes[0] & classes[1]:
        raise _refusal(folder, "no class has images in both train and test", users)


def check_each(folder: Path, examples: Sequence[Example], users: str) -> None:
    """DataError for a class whose images are of one user, one DICOM patient or one DICOM series.

    Nothing is refused if there is only one in all classes, as after anonymisation. A class is
    judged by its DICOM files, if it has two or more, whatever else it has. Their headers are not
    read if users were read from them.
    """
    classes: dict[str, list[Example]] = {}
    for example in examples:
        classes.setdefault(example.label, []).append(example)
    of_users = {label: {x.user for x in own} for label, own in classes.items()}
    if examples[0].user and len(set().union(*of_users.values())) > 1:
        for label in (x for x in sorted(classes) if len(of_users[x]) == 1):
            raise _refusal(folder, f"all images of class {label} are of one user", users)
    if users == "file":
        return
    scans = {
        label: [folder / x.file for x in own if suffix_of(x.file) in pixels.DICOM_SUFFIXES]
        for label, own in sorted(classes.items())
    }
    files = {label: own for label, own in scans.items() if len(own) > 1}
    some = {label: _tags(own[:: -(-len(own) // SAMPLE)] + own[-1:]) for label, own in files.items()}
    for number, tag in enumerate(TAGS):
        everywhere = set().union(*(x[number] for x in some.values()))
        for label in (x for x in files if len(some[x][number]) == 1 < len(everywhere)):
            if len(_tags(files[label])[number]) == 1:
                raise _refusal(folder, f"all DICOM files of class {label} have one {tag}", users)


def _tags(files: Sequence[Path]) -> tuple[set[str], ...]:
    """The different values of each of `TAGS`, of the files that can be read."""
    values: tuple[set[str], ...] = tuple(set() for _ in TAGS)
    for file in files:
        try:
            tags = pixels.dicom_tags(file, TAGS)
        except DataError:  # the import reports such a file
            continue
        for seen, value in zip(values, (_person(tags[0]), *tags[1:]), strict=True):
            seen.update({value} if not is_missing(value) else ())
    return values


def _person(patient: str) -> str:
    """Returns the `user_id` of a PatientID.

    Returns the PatientID itself if it may be of several persons.
    """
    try:
        return user_id(patient)
    except InputError:
        return patient


def _refusal(folder: Path, why: str, users: str) -> DataError:
    also = {
        "": " and give --user_from=folder",
        "folder": ": --user_from=folder takes the folders below the classes",
    }.get(users, "")
    return DataError(
        f"{folder}: {why}: are they persons? Names of classes are public. For persons make "
        f"FOLDER/CLASS/PERSON/…{also}; if they are the classes, name them with --classes=A,B,…"
    )
