"""Folders and tables as people have them are read rightly, or refused in one line that says why."""

import collections
import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict
from PIL import Image

from bam.cli import run_lines
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.images import importing, leaks, listing
from bam.privacy import statement
from bam.training import loading, loop
from configs import digits
from tests.cases import refused
from tests.image_files import TWO, tree

OPTIONS = importing.Options(Preprocessing((8, 8), 1), ("A", "B"), 0.3, strict=False)


def counts(examples, what=("split", "label", "user")):
    """For example "train:A 2, test:A 1", of what there is."""
    keys = [":".join(filter(None, (getattr(x, y) for y in what))) for x in examples]
    return ", ".join(f"{key} {num}" for key, num in sorted(collections.Counter(keys).items()))


def split(name):
    return TWO.replace("A/", f"{name}/A/").replace("B/", f"{name}/B/")


FOLDERS = {
    # name: (tree, arguments, what comes of it or "!" and the error, lines that are printed)
    "plain": (TWO, {}, "A 2, B 2", ""),
    "three splits": (split("train") + split("val") + split("test"), {},
        "test:A 2, test:B 2, train:A 4, train:B 4", "4 validation images put in the train"),
    "validation as test": (split("TRAIN") + split("Validation") + split("Testing"),
        {"validation": "test"}, "test:A 4, test:B 4, train:A 2, train:B 2", "put in the test"),
    "validation left": (split("training") + split("valid") + split("test"), {"validation": "leave"},
        "test:A 2, test:B 2, train:A 2, train:B 2", "4 validation images left out"),
    "no test": (split("Train") + split("valid"), {}, "test:A 2, test:B 2, train:A 2, train:B 2",
        "put in the test split"),
    "train alone": (split("train"), {}, "A 2, B 2", "no test split, so a hash chooses"),
    "test alone": (split("test") + split("val"), {}, "!no training images", ""),
    "splits and classes": (TWO + split("Test"), {}, "!mixes split folders .Test. with", ""),
    "splits and notes": (split("train") + split("test") + "docs/old/a.txt", {},
        "test:A 2, test:B 2, train:A 2, train:B 2", r"1 \.txt"),
    "splits of images": ("train/1.png train/2.png test/1.png", {}, "!no folder of a class .*"
        "3 outside of class folders", ""),
    "a level too many": (split("data/set"), {}, "!did you mean .*data/set", ""),
    "splits too low": (split("set/train") + split("set/test"), {}, "!did you mean .*/set", ""),
    "images alone": ("1.png 2.png", {}, "!2 outside of class folders", ""),
    "junk": (TWO + "__MACOSX/A/._1.png A/._1.png A/Thumbs.db A/.thumbnails/1.png .git/1.png "
        "desktop.ini B/sub/.ipynb_checkpoints/1-checkpoint.png A/@eaDir/1.png", {}, "A 2, B 2",
        "8 hidden or of the system"),
    "unread": (TWO + "A/1.psd A/2.PSD B/3.npz B/4.zip A/5 notes.txt", {}, "A 2, B 2",
        r"2 \.psd: save them as PNG, 1 no suffix: DICOM.*, 1 \.npz: .*, 1 \.zip: unpack"),
    "all unread": ("A/1.psd A/2.psd B/1.psd B/2.psd", {}, "!4 .psd: save them as PNG", ""),
    "an empty class": (TWO + "C/", {}, "!class C has no image.*A 2, B 2, C 0 .NOT PRIVATE", ""),
    "a class of a split's name": (split("train") + "train/val/1.png train/val/2.png", {},
        "A 2, B 2, val 2", "unusual class names: val.*A 2, B 2, val 2 .NOT PRIVATE"),
    "a class in two cases": (TWO + "a/1.png a/2.png", {}, "A 2, B 2, a 2",
        "unusual class names: A, a.*A 2, B 2, a 2"),
    "a broken link": (TWO + "A/3.png>nowhere.png B/dir>nowhere C>nowhere", {}, "A 3, B 3",
        "1 that cannot be read: C"),
    "no UTF-8": (TWO + "A/\xff.png", {}, "A 3, B 2", ""),
    "a class not of UTF-8": (TWO + "\xff/1.png \xff/2.png", {}, "!not UTF-8", ""),
    "links in circles": (TWO + "A/up>.. A/self>self B/a>../A/b A/b>../B/a A/here>. all>. C>C", {},
        "A 4, B 3", "3 links in circles"),
    "a linked folder": (TWO + "A/more>../../outside", {}, "A 3, B 2", "1 subfolder. "),
    "one file, two classes": (TWO + "B/3.png>../A/1.png", {}, "!B/3.png occurs again as A", ""),
    "one file, two names": (TWO + "A/3.png>1.png", {}, "A 2, B 2", "1 further name of a"),
    "patients": ("A/p1/1.png A/p2/1.png B/p1/x/1.png B/p3/1.png", {}, "A 2, B 2",
        "NOT PRIVATE: .* 3 subfolders. .* --user_from=folder: otherwise ε protects one image"),
    "patients named": ("A/p1/1.png A/p2/1.png B/p1/x/1.png B/p3/1.png", {"users": "folder"},
        "A:p1 1, A:p2 1, B:p1 1, B:p3 1",
        "NOT PRIVATE: the folder directly below a class is taken as the user, and images lie"),
    "patients in DICOM files": ("A/p1/1.png A/p2/1.png B/p1/x/1.png B/p3/1.png",
        {"users": "file"}, "A 2, B 2", ""),
    "masks beside images": (TWO + "A/1_mask.png B/1-SEG.PNG B/1_gt.tif B/4_mask.png", {},
        "A 2, B 3", "ignored: 3 masks, as A/1_mask.png: --masks uses them"),
    "masks of other dots and accents": (TWO + "A/1.2.png A/1.2_mask.png A/3_label.3.png "
        + "B/e\u0301.png B/\u00e9_MASK.png ".encode().decode("latin-1") + "B/_mask.png", {},
        "A 4, B 4",
        "ignored: 2 masks, as A/1.2_mask.png"),
    "masks in another language": ("A/1.png A/1_Maske.png A/2.png A/2_Maske.png B/3.png "
        "B/3-maske.png B/4.png B/4_Maske.png B/4_left.png", {}, "!4 files are named like another "
        "and one more word, as A/1_Maske.png: are they masks. Remove them, or .* with --masks", ""),
    "masks in another language, used": ("A/1.png A/1_Maske.png A/2.png A/2_Maske.png B/3.png "
        "B/3_Maske.png B/4.png B/4_Maske.png", {"use_masks": True}, "A 4, B 4", ""),
    "a word behind half of the names": ("A/1.png A/1_left.png A/2.png A/2_left.png B/3.png "
        "B/3_left.png B/4.png B/5.png B/6.png", {}, "A 4, B 5", ""),
    "a word behind all names": (TWO.replace(".png", "_left.png"), {}, "A 2, B 2", ""),
    "numbers behind all names": ("A/1.png A/1_2.png A/3.png A/3_2.png B/1.png B/1_2.png", {},
        "A 4, B 2", ""),
    "a level too many below the splits": (split("train/images") + split("test/images"), {},
        "!one folder below each split, as test/images, which would be the only class", ""),
    "a level that says images": ("A/images/1.png A/images/2.png B/images/1.png B/images/2.png", {},
        "A 2, B 2", ""),
    "masks that are images": (TWO + "A/1_mask.png", {"use_masks": True}, "A 3, B 2", ""),
    "a folder of masks": (TWO + "masks/1.png masks/2.png", {}, "!masks may be masks, not a class: "
        "make FOLDER/CLASS/… of the images, .* add --classes=A,B,masks$", ""),
    "a class called masks": (TWO + "masks/1.png masks/2.png", {"named": ["A", "B", "masks"]},
        "A 2, B 2, masks 2", "unusual class names: masks"),
    "numbered masks, as BUSI has": ("A/x_(1).png A/x_(1)_mask.png A/x_(1)_mask_1.png A/y.png "
        "B/x.png B/x_mask_1.png B/y.png", {}, "A 2, B 2", "ignored: 3 masks, as A/x_.1._mask.png"),
    "superpixels, as ISIC has": ("A/I_1.png A/I_1_superpixels.png A/I_2.png B/I_3.png B/I_4.png "
        "B/I_4_segmentation.png B/I_4_Ground-Truth.png", {}, "A 2, B 2", "ignored: 3 masks"),
    "masks by a word in front": ("A/mask_1.png A/image_1.png A/1_gt.png A/1.png B/img_1.png "
        "B/label-1.png B/case_label_07.png B/case_07.png", {}, "A 2, B 2", "ignored: 4 masks"),
    "names that end like a mask's": (TWO + "A/3_mask.png A/label.png A/4_mask_1.png A/unmask.png "
        "B/1_masked.png B/segment.png B/2gt.png B/mask_4.png", {}, "A 6, B 6",
        "NOT PRIVATE: 4 images are called like masks, as A/3_mask.png, but not beside an image"),
    "masks of images in another folder": ("X_Input/1.png X_Input/2.png "
        "X_GroundTruth/1_segmentation.png X_GroundTruth/2_segmentation.png", {},
        "!all images of class X_GroundTruth are called like masks, as X_GroundTruth/1_s.*"
        "If they are classes, add --classes=X_GroundTruth,X_Input$", ""),
    "masks in another folder, as a class": ("X/1.png X/2.png Y/1_segmentation.png Y/2_mask.png",
        {"named": ["X", "Y"]}, "X 2, Y 2", "NOT PRIVATE: 2 images are called like masks, as Y/1_s"),
    "masks in another folder, as images": ("X/1.png X/2.png Y/1_segmentation.png Y/2_mask.png",
        {"use_masks": True}, "X 2, Y 2", ""),
    "one image more": ("X/1.png X/2.png Y/1_segmentation.png Y/2_mask.png Y/3.png", {},
        "X 2, Y 3", "NOT PRIVATE: 2 images are called"),
    "masks of images of other names": ("A/volume-0.nii A/segmentation-0.nii B/1.nii B/2.nii", {},
        "A 2, B 2", "NOT PRIVATE: 1 image is called like masks, as A/segmentation-0.nii"),
    "words for masks in all names": ("with_mask/with_mask_1.png with_mask/with_mask_2.png "
        "without_mask/no_mask_1.png without_mask/no_mask_2.png", {},
        "with_mask 2, without_mask 2", "NOT PRIVATE: 4 images are called like masks"),
    "volumes of one person": ("A/s_T1w.nii.gz A/s_seg.nii.gz A/sub-1.nii.gz A/sub-1_seg.nii.gz "
        "B/BraTS_1_flair.nii B/BraTS_1_t1.nii B/BraTS_1_seg.nii B/BraTS_2_seg.nii", {},
        "A 2, B 3", "ignored: 3 masks"),
    "masks of BIDS": ("A/sub-1/anat/sub-1_T1w.nii.gz A/sub-1/anat/sub-1_T1w_dseg.nii.gz "
        "A/sub-1/anat/sub-1_space-T1w_desc-brain_mask.nii.gz A/sub-2/sub-2_T1w.nii.gz "
        "A/sub-2/sub-2_label.nii.gz B/sub-3_T1w.nii B/sub-4_T1w.nii "
        "A/derivatives/sub-2/sub-2_T1w.nii derivatives/x/sub-1/sub-1_dseg.nii", {}, "A 2, B 2",
        "ignored: 5 masks"),
    "images beside masks": ("images/1.png images/2.png masks/1.png masks/2.png", {},
        "!masks: images and masks may be images and their masks, not classes: make FOLDER/CLASS/",
        ""),
    "images beside masks, as classes": ("images/1.png images/2.png masks/1.png masks/2.png",
        {"named": ["images", "masks"]}, "images 2, masks 2", "unusual class names: masks"),
    "images beside masks, as images": ("images/1.png images/2.png masks/1.png masks/2.png",
        {"use_masks": True}, "images 2, masks 2", "unusual class names: masks"),
    "images beside masks of a long name": ("Images/1.png Images/2.png lung_masks/1.png "
        "lung_masks/2.png", {}, "!Images and lung_masks may be", ""),
    "images beside masks in splits": ("train/images/1.png train/images/2.png train/masks/1.png "
        "train/masks/2.png test/images/1.png", {}, "!train/masks: images and masks may be", ""),
    "masks, which are worn": ("mask/1.png mask/2.png no_mask/1.png no_mask/2.png", {},
        "!mask may be masks, not a class.* add --classes=mask,no_mask$", ""),
    "with and without a mask": ("with_mask/1.png with_mask/2.png without_mask/p/1.png "
        "without_mask/p/2.png", {}, "with_mask 2, without_mask 2", "NOT PRIVATE: .* subfolder"),
    "masks by class, beside the classes": (TWO + "masks/A/1.png masks/B/1.png", {}, "A 2, B 2",
        "ignored: 2 masks, as masks/A/1.png: --masks uses them"),
    "masks and images above the classes": (split("images") + split("masks"), {},
        "!contains one folder only: did you mean .*/images", ""),
    "masks above the classes, as images": (split("images") + split("gt"), {"use_masks": True},
        "gt 4, images 4", "unusual class names: gt"),
    "masks below the classes": ("A/images/1.png A/images/2.png A/lung_masks/1.png B/images/1.png "
        "B/images/2.png B/Ground_Truth/1.png", {}, "A 2, B 2",
        "ignored: 2 masks, as A/lung_masks/1.png"),
    "persons below images": ("A/images/p1/1.png A/images/p2/2.png B/images/p3/1.png "
        "B/images/p4/2.png", {}, "A 2, B 2", "1 subfolder. If each of these is a person"),
    "masks beside splits": (split("train") + split("test") + "train_masks/1.png gt/A/1.png", {},
        "test:A 2, test:B 2, train:A 2, train:B 2", "ignored: 2 masks"),
    "masks of the decathlon": ("imagesTr/1.nii imagesTr/2.nii labelsTr/1.nii labelsTr/2.nii", {},
        "!imagesTr and labelsTr may be images and their masks", ""),
    "persons called like masks": ("A/gt12/1.png A/gt12/2.png B/label/1.png B/2.png B/3.png", {},
        "A 2, B 2", "ignored: 1 mask, as B/label/1.png"),
    "persons named, called like masks": ("A/GT/1.png A/label1/2.png B/gt/1.png B/x/2.png "
        "B/x/masks/3.png", {"users": "folder"}, "A:GT 1, A:label1 1, B:gt 1, B:x 1",
        "ignored: 1 mask, as B/x"),
    "masks of scans with their words": ("A/sub-1_acq-seg_T1w.nii A/sub-1_desc-brain_mask.nii "
        "A/sub-2_T1w.nii B/sub-1_ses-GT_T1w.nii B/sub-1_ses-GT_seg.nii B/sub-2_T1w.nii", {},
        "A 2, B 2", "ignored: 2 masks, as A/sub-1_desc"),
    "scans called like masks": ("A/sub-01.nii A/sub-GT.nii B/sub-1_ses-1.nii B/sub-1_ses-GT.nii "
        "B/sub-1_ses-1_seg.nii B/sub-1_desc-seg.nii", {}, "A 2, B 2",
        "ignored: 2 masks, as B/sub-1_desc-seg"),
    "masks as pictures": ("A/images_png/1.png A/masks_png/1.png A/images_png/2.png B/1.png "
        "B/2.png", {}, "A 2, B 2", "ignored: 1 mask, as A/masks_png/1"),
    "a link that is called like masks": (TWO + "A/masks>p A/p/3.png", {}, "A 3, B 2",
        "1 subfolder"),
    "classes below persons": ("p1/A/1.png p1/B/1.png p2/A/1.png p2/B/1.png", {}, "p1 2, p2 2",
        "classes p1, p2 .*If they are the classes, move them up one level"),
    "splits in classes": ("A/train/1.png A/test/1.png B/train/1.png B/test/1.png", {},
        "!A/test/1.png: split folders belong above classes", ""),
    "a patient missing": ("A/p1/1.png A/2.png B/p1/1.png B/p1/2.png", {"users": "folder"},
        "!A/2.png is not in a user's folder: move it to", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_read_rightly_or_refused_in_one_line(tmp_path, kind):
    spec, arguments, expected, printed = FOLDERS[kind]
    tree(tmp_path, "outside/9.png")
    top, lines = tree(tmp_path / "photographs", spec), []
    arguments = {"log": lines.append, **arguments}
    if expected.startswith("!"):
        refused(expected[1:], listing.in_class_folders, top, kind=DataError, **arguments)
        return
    examples = listing.in_class_folders(top, **arguments).examples
    assert counts(examples) == expected
    assert re.search(printed, "\n".join(lines)) if printed else not lines


MASK_ROWS = {
    # name: (tree, rows, arguments, what comes of it or "!" and the error, lines that are printed)
    "a mask": (TWO + "A/1_mask.png", "A/1.png A/2.png A/1_mask.png B/1.png", {}, "A 2, B 1",
        "1 row left out for naming masks, as row 4: A/1_mask.png: --masks uses them"),
    "a mask as an image": (TWO + "A/1_mask.png", "A/1.png A/1_mask.png B/1.png",
        {"use_masks": True}, "A 2, B 1", ""),
    "images and masks": ("images/1.png images/2.png masks/1.png masks/2.png",
        "images/1.png images/2.png masks/1.png masks/2.png", {}, "images 2",
        "2 rows left out for naming masks, as row 4: masks/1.png"),
    "masks without images": ("a/1_mask.png masks/1.png", "a/1_mask.png masks/1.png", {},
        "a 1, masks 1", "NOT PRIVATE: 1 image is called like masks, as a/1_mask.png"),
    "masks of images in no row": ("a/1.png a/1_mask.png", "a/1_mask.png", {},
        "!each row names a mask, as row 2: a/1_mask.png: add --masks", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASK_ROWS)
def test_rows_that_name_masks_are_left_out_and_counted(tmp_path, kind):
    spec, named, arguments, expected, printed = MASK_ROWS[kind]
    top, lines, table = tree(tmp_path / "x", spec), [], tmp_path / "t.csv"
    table.write_text("\n".join(["file,label", *(f"{x},{x.split('/')[0]}" for x in named.split())]))
    columns = {"file": "file", "label": "label"}
    read = lambda: listing.in_table(top, table, columns, log=lines.append, **arguments)  # noqa: E731
    if expected.startswith("!"):
        refused(expected[1:], read, kind=DataError)
        return
    listed = read()
    assert counts(listed.examples) == expected
    assert listed.num_images == len(listed.examples) + sum(listed.unused.values())
    lines = [x for x in lines if "without a row in the table" not in x]
    assert re.search(printed, "\n".join(lines)) if printed else not lines


PERSONS_OF_MASKS = {  # rows "file=user" -> those that are left out, or "!" and the error
    "one person": ("A/1.png=p A/1_mask.png=p B/1.png=q", "A/1_mask.png"),
    "two persons": ("A/1.png=p A/1_mask.png=q B/1.png=r",
        "!row 3: A/1_mask.png is called like a mask of row 2: A/1.png, which is of another user: "
        "add --masks to import it, or remove the row$"),
    "the image in no row": ("A/1_mask.png=q B/1.png=r", "A/1_mask.png"),
    "several images": ("B/s-1_a.nii=p B/s-1_b.nii=q B/s-1_seg.nii=q A/1.png=r", "B/s-1_seg.nii"),
    "several images of others": ("B/s-1_a.nii=p B/s-1_b.nii=p B/s-1_seg.nii=q A/1.png=r",
        "!row 4: B/s-1_seg.nii is called like a mask of row 2: B/s-1_a.nii"),
    "folders of one person": ("images/1.png=p masks/7.png=p B/1.png=q", "masks/7.png"),
    "folders of two persons": ("images/1.png=p masks/1.png=q B/1.png=r",
        "!row 3: masks/1.png is called like a mask of row 2: images/1.png, which is of another"),
    "a folder of images in no row": ("masks/1.png=q B/1.png=r", "masks/1.png"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PERSONS_OF_MASKS)
def test_no_image_is_left_out_for_an_image_of_another_person(tmp_path, kind):
    named, expected = PERSONS_OF_MASKS[kind]
    spec = TWO + "A/1_mask.png images/1.png masks/1.png masks/7.png B/s-1_a.nii B/s-1_b.nii "
    top, table = tree(tmp_path / "x", spec + "B/s-1_seg.nii"), tmp_path / "t.csv"
    pairs = [x.split("=") for x in named.split()]
    table.write_text("\n".join(["file,label,user", *(f"{x},0,{y}" for x, y in pairs)]))
    columns = {"file": "file", "label": "label", "user": "user"}
    read = lambda **more: listing.in_table(top, table, columns, **more).examples  # noqa: E731
    if expected.startswith("!"):
        refused(expected[1:], read, kind=DataError)
    else:
        assert [x for x, _ in pairs if x != expected] == [x.file for x in read()]
    assert len(read(use_masks=True)) == len(pairs)
    del columns["user"]  # the control: each image is protected on its own
    if len(pairs) > 2:
        assert len(read()) == len(pairs) - 1


def test_a_folder_of_any_depth_is_read(tmp_path):
    top = tree(tmp_path / "x", TWO)
    inner, lines = top / "A", []
    try:
        for _ in range(1100):  # more than Python recurs
            inner = inner / "d"
            inner.mkdir()
        Image.new("L", (12, 12)).save(inner / "3.png")
        assert counts(listing.in_class_folders(top, log=lines.append).examples) == "A 3, B 2"
    finally:
        (inner / "3.png").unlink(missing_ok=True)
        while inner != top / "A":  # deeper than what else removes folders can go
            inner.rmdir()
            inner = inner.parent


def test_each_folder_is_walked_once_however_many_links_lead_to_it(tmp_path, monkeypatch):
    names = [f"d{i}" for i in range(12)]
    top = tree(tmp_path / "x", TWO + " ".join(f"A/{x}/{x}.png" for x in names))
    for name in names:
        for other in names:
            if other != name:
                (top / "A" / name / f"to_{other}").symlink_to(f"../{other}")
    walked, iterdir, lines = [], Path.iterdir, []
    monkeypatch.setattr(Path, "iterdir", lambda path: walked.append(path) or iterdir(path))
    assert counts(listing.in_class_folders(top, log=lines.append).examples) == "A 14, B 2"
    assert len(walked) == 3 + len(names)
    assert "132 links to folders that are read elsewhere" in lines[0]


@pytest.mark.parametrize(
    ("link", "users", "is_read"),
    [
        ("A/again>p1", "", True), ("A/again>p1", "folder", False), ("B/again>../A/p1", "", False),
        ("C>A", "", False), ("A/p1/again>../../A/p2/in", "folder", False),
        ("A/p2/again>in", "folder", True),
    ],
)  # fmt: skip
def test_a_link_gives_images_no_second_label_or_user(tmp_path, link, users, is_read):
    spec = f"A/p1/1.png A/p2/1.png A/p2/in/3.png B/p3/1.png B/p4/1.png {link}"
    top, expected = tree(tmp_path / "x", spec), "A 3, B 2"
    read = lambda: listing.in_class_folders(top, users=users).examples  # noqa: E731
    if is_read:
        assert counts(read(), ("label",)) == expected
    else:
        refused("links to .* would have two labels, users or splits", read, kind=DataError)


HEAD = "file,label,who,part"
ROWS = f"{HEAD}\nA/1.png,A,p1,train\nB/1.png,B,p2,Test\n"
COCO = """{"info": {}, "licenses": [], "images": [
 {"id": 1, "file": "A/1.png", "who": "p1", "part": "train", "height": 9},
 {"id": 2, "file": "B/1.png", "who": "p2", "part": "test", "height": 9}],
 "categories": [{"id": 1, "name": "A"}, {"id": 2, "name": "B"}],
 "annotations": [{"id": 9, "image_id": 1, "category_id": 1}, {"image_id": 2, "category_id": 2}]}
"""
TABLES = {
    # name: (text, bytes or columns of a table, or its suffix and text, what comes of it or "!" and
    # the error, lines)
    "plain": (ROWS, "test:B 1, train:A 1", ""),
    "a mark": (b"\xef\xbb\xbf" + ROWS.encode(), "test:B 1, train:A 1", ""),
    "UTF-16": (ROWS.encode("utf-16"), "test:B 1, train:A 1", ""),
    "semicolons": (ROWS.replace(",", ";"), "test:B 1, train:A 1", ""),
    "tabs": (ROWS.replace(",", "\t"), "test:B 1, train:A 1", ""),
    "Excel": ("sep=;\n" + ROWS.replace(",", ";"), "test:B 1, train:A 1", ""),
    "CRLF": (ROWS.replace("\n", "\r\n"), "test:B 1, train:A 1", ""),
    "old Mac": (ROWS.replace("\n", "\r"), "test:B 1, train:A 1", ""),
    "spaces": (ROWS.replace(",", " , ") + " , , ,\n\n", "test:B 1, train:A 1", ""),
    "other case": (ROWS.replace("label", "Label").replace("png", "PNG"), "test:B 1, train:A 1", ""),
    "quotes": ('file,label,who,part\n"A/1.png", "A","p,1",val\nB/1.png,B,p2,TRAINING\n',
        "test:A 1, train:B 1", "1 validation image put in the test split: --validation="),
    "Latin-1": (f"{HEAD}\nÄ/1.png,A,p1,train\nB/1.png,B,p2,test\n".encode("latin-1"),
        "test:B 1, train:A 1", "read as cp1252"),
    "other accents": (ROWS.replace("A/", "A\u0308/"), "test:B 1, train:A 1", ""),
    "ways": (f"{HEAD}\n./A/1.png,A,p1,train\n../photographs/A/2.png,A,p1,train\n"
        "B\\1.png,B,p2,test\n{top}/B/2.png,B,p3,test\nA/../B/3,B,p2,test\n",
        "test:B 3, train:A 2", ""),
    "rows again": (f"{ROWS}./A/1.png,A,p1,Train\n", "test:B 1, train:A 1", "1 further name"),
    "two labels": (f"{ROWS}A/../A/1.png,B,p1,train\n", "!row 4: A/1.png occurs.* row 2", ""),
    "a link": (f"{ROWS}link.png,A,p1,test\n", "!row 4: link.png occurs again as row 2: A/1", ""),
    "two splits": (f"{ROWS}A/1.png,A,p1,test\n", "!row 4: .*split", ""),
    "a comma more": (f"{ROWS}A/2.png,A,p1,train,x\n", "!row 4 has 5 values, the header 4", ""),
    "a comma less": (f"{ROWS}A/2.png,A,p1\n", "!row 4 lacks a value of part", ""),
    "NaN": (f"{ROWS}A/2.png,A,NaN,train\n", "!row 4 has no user: who 'NaN' means missing", ""),
    "no label": (f"{ROWS}A/2.png, ,p1,train\n", "!row 4 lacks a value of label", ""),
    "a split of no name": (f"{ROWS}A/2.png,A,p1,fold3\n", "!row 4: split 'fold3' is not train", ""),
    "no file": (f"{ROWS}A/77.png,A,p1,train\n", "!row 4: no file A/77.png", ""),
    "outside": (f"{ROWS}../outside/9.png,A,p1,train\n", "!row 4: no file ../outside/9.png", ""),
    "two files meant": (f"{ROWS}A/5,A,p1,train\n", "!row 4: .*A/5.png, A/5.tif", ""),
    "a column twice": (f"{HEAD},who\nA/1.png,A,p,train,q\n", "!2 columns who among", ""),
    "an open quote": (f'{ROWS}"A/2.png,A,p1,train\n', "!line 4: not a readable CSV", ""),
    "UTF-16, no mark": (ROWS.encode("utf-16-le"), "test:B 1, train:A 1", ""),
    "a workbook": (b"PK\x03\x04" + bytes(99), "!save it as CSV", ""),
    "bytes": (bytes(range(256)) * 4, "!not a readable CSV|no column", ""),
    "blank lines": (f"\n\n{ROWS}A/2.png, ,p1,train\n", "!row 6 lacks a value of label", ""),
    "no rows": (HEAD, "!has no rows", ""),
    "nothing": ("", "!no column", ""),
    "Parquet": ({"file": ["A/1.png", "B/1.png"], "label": [0, 1], "who": [7.0, 8.0],
        "part": ["train", "test"]}, "test:1 1, train:0 1", ""),
    "JSON lines": ((".jsonl", '{"file": "A/1.png", "label": "A", "who": 1, "part": "train"}\n\n'
        '{"part": "test", "who": 2.0, "x": [1], "file": "B/1.png", "label": "B"}\n'),
        "test:B 1, train:A 1", ""),
    "JSON lines, one open": ((".jsonl", '{"file": "A/1.png"}\n{"file": '), "!row 2: not JSON", ""),
    "JSON lines, blank lines": ((".jsonl", '\n\n{"file": "A/1.png", "label": "", '
        '"who": 1, "part": "train"}'), "!row 3 lacks a value of label", ""),
    "JSON lines, a list": ((".jsonl", "[1, 2]"), "!row 1 is not an object", ""),
    "JSON lines, nothing": ((".jsonl", ""), "!no column", ""),
    "JSON lines, a value less": ((".ndjson", '{"file": "A/1.png", "label": "A", "who": 1, "part": '
        '"train"}\n{"file": "A/2.png", "label": null, "who": 1, "part": "train"}'),
        "!row 2 lacks a value of label", ""),
    "JSON rows": ((".json", '[{"file": "A/1.png", "label": "A", "who": 1, "part": "train"}, '
        '{"file": "B/1.png", "label": "B", "who": 1, "part": "test"}]'), "test:B 1, train:A 1", ""),
    "JSON of something else": ((".json", '{"version": 5}'), "!neither a list of rows nor COCO", ""),
    "JSON, deep": ((".json", "[" * 10**5), "!not JSON", ""),
    "COCO": ((".json", COCO), "test:B 1, train:A 1", ""),
    "COCO, a category twice": ((".json", COCO.replace('"category_id": 2', '"category_id": 1')
        .replace('"image_id": 2', '"image_id": 1')), "!row 2 lacks a value of label", ""),
    "COCO, two categories": ((".json", COCO.replace('"image_id": 2', '"image_id": 1')),
        "!annotation 2: image '1' has two labels, 'A' and 'B': .*a column for each", ""),
    "COCO, boxes": ((".json", COCO.replace('"id": 9', '"bbox": [1, 2, 3, 4]')),
        "test:B 1, train:A 1", r"annotations are of parts of images \(bbox\): the label of an im"),
    "COCO, boxes of two categories": ((".json", COCO.replace('"image_id": 2', '"image_id": 1')
        .replace('"id": 9', '"bbox": [1, 2, 3, 4]')), "!image '1' has two labels", ""),
    "COCO, captions": ((".json", COCO.replace('"id": 9', '"caption": "a cat"')),
        "!annotation 1 has a caption: only categories are read", ""),
    "COCO, an empty outline": ((".json", COCO.replace('"id": 9', '"segmentation": []')),
        "test:B 1, train:A 1", ""),
    "COCO, two images of an id": ((".json", COCO.replace('"id": 2, "file"', '"id": 1, "file"')),
        "!images 2 has no id or a repeated one: '1'", ""),
    "COCO, categories of an id": ((".json", COCO.replace('"id": 2, "name"', '"id": 1, "name"')),
        "!categories 2 has no id or a repeated one: '1'", ""),
    "COCO, no id": ((".json", COCO.replace('"id": 1, "file"', '"file"')), "!images 1 has no", ""),
    "COCO, no such category": ((".json", COCO.replace('"category_id": 2', '"category_id": 3')),
        "!annotation 2: no category has the id '3'", ""),
    "COCO, no such image": ((".json", COCO.replace('"image_id": 2', '"image_id": 7')),
        "!an annotation names image '7', but no image has this id", ""),
    "Parquet, NaN": ({"file": ["A/1.png", "B/1.png"], "label": [0, 1], "who": [7, None],
        "part": ["train", "test"]}, "!row 2 lacks a value of who", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_read_rightly_or_refused_in_one_line(tmp_path, kind):
    content, expected, printed = TABLES[kind]
    spec = "A/2.png A/5.png A/5.tif B/1.png B/2.png B/3.png Ä/1.png link.png>A/1.png"
    top, lines, table = tmp_path / "photographs", [], tmp_path / "table.csv"
    tree(tmp_path, "outside/9.png")
    tree(top, f"A/1.png {spec}".replace("Ä", "Ä".encode().decode("latin-1")))
    if isinstance(content, dict):
        pq.write_table(pa.table(content), table := tmp_path / "table.PARQUET")
    else:
        if isinstance(content, tuple):
            table = tmp_path / f"table{content[0]}"
            content = content[1]
        content = content.replace("{top}", str(top)) if isinstance(content, str) else content
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
    columns = {"file": "file", "label": "label", "user": "who", "split": "part"}
    if expected.startswith("!"):
        refused(expected[1:], listing.in_table, top, table, columns, kind=DataError)
        return
    examples = listing.in_table(top, table, columns, log=lines.append).examples
    assert counts(examples, ("split", "label")) == expected
    used = {os.path.realpath(top / x.file) for x in examples}
    assert len(used) == len(examples)
    there = {os.path.realpath(image) for image in listing.tree(top).images}
    unused = (
        f"{len(there) - len(used)} images of the folder without a row in the table: not used (for "
        "example "
    )
    (line,) = [x for x in lines if x.startswith(unused)]
    assert os.path.realpath(top / line.removeprefix(unused).removesuffix(")")) in there - used
    lines.remove(line)
    assert re.search(printed, "\n".join(lines)) if printed else not lines


def test_a_row_may_name_a_link_to_a_file_without_a_suffix(tmp_path):
    spec = "A/1.png cache/x.png A/2.png>../cache/71f0 A/3.png>../cache/71f0"
    top, table = tree(tmp_path / "x", spec), tmp_path / "t.csv"
    (top / "cache" / "x.png").rename(top / "cache" / "71f0")
    columns = {"file": "file", "label": "label"}
    read = lambda: listing.in_table(top, table, columns).examples  # noqa: E731
    table.write_text("file,label\nA/1.png,a\nA/2.png,b\n")
    assert [x.file for x in read()] == ["A/1.png", "A/2.png"]
    table.write_text("file,label\nA/1.png,a\nA/2.png,b\nA/3.png,b\n")
    assert [x.file for x in read()] == ["A/1.png", "A/2.png"]  # one file, so one image
    (tmp_path / "to").symlink_to(top)  # the control: a path outside that leads into the folder
    table.write_text(f"file,label\n{tmp_path}/to/A/1.png,a\n")
    assert [x.file for x in read()] == ["A/1.png"]


def test_a_column_that_may_name_persons_is_offered(tmp_path):
    top, lines = tree(tmp_path / "x", TWO), []
    rows = ["file,label,patient_id", *(f"{x},{x[0]},{x[-5]}" for x in TWO.split())]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    columns = {"file": "file", "label": "label"}
    listing.in_table(top, tmp_path / "t.csv", columns, log=lines.append)
    assert len(lines) == 1 and "NOT PRIVATE" in lines[0] and "--user_column=patient_id" in lines[0]
    listing.in_table(top, tmp_path / "t.csv", columns | {"user": "patient_id"}, log=lines.append)
    assert len(lines) == 1


BESIDE = "train/1.png train/2.png train/3.png test/1.png test/2.png "
META = "file_name,label\n1.png,A\n2.png,B\n"


@pytest.mark.parametrize(
    ("files", "table", "expected", "num_unused"),
    [
        ({"train/m.csv": META, "test/m.csv": META}, "m.csv",
         "test:A 1, test:B 1, train:A 1, train:B 1", 1),
        ({"train/m.csv": META, "val/m.csv": "file_name,label\n../test/1.png,A\n"}, "m.csv",
         "test:A 1, train:A 1, train:B 1", 2),
        ({"train/m.csv": META}, "train/m.csv", "A 1, B 1", 3),
        ({"train/m.csv": META}, "{top}/train/m.csv", "A 1, B 1", 3),
        ({"m.csv": META.replace("file_name,", "part,file_name,").replace("1.png", "Train,train/1")
          .replace("2.png", "Test,test/2")}, "m.csv", "test:B 1, train:A 1", 3),
        ({"m.jsonl": '{"file_name": "train/1.png", "label": "A"}'}, "m.jsonl", "A 1", 4),
        ({}, "m.csv", "!m.csv: no such file", 0),
        ({"train/m.csv": META + "4.png,A"}, "m.csv", "!train/m.csv: row 4: no file 4.png", 0),
    ],
)  # fmt: skip
def test_a_table_in_the_folder_or_its_splits_names_files_beside_it(
    tmp_path, files, table, expected, num_unused
):
    top, columns = tree(tmp_path / "x", BESIDE), {"file": "file", "label": "label"}
    for name, content in files.items():
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text(content)
    columns |= {"split": "part"} if "part" in "".join(files.values()) else {}
    table = Path(table.replace("{top}", str(top)))
    if expected.startswith("!"):
        refused(expected[1:], listing.in_table, top, table, columns, kind=DataError)
        return
    listed = listing.in_table(top, table, columns)
    assert counts(listed.examples, ("split", "label")) == expected
    assert (listed.num_images, sum(listed.unused.values())) == (5, num_unused)


def test_a_folder_of_images_beside_a_table_of_their_labels_says_so(tmp_path):
    top = tree(tmp_path / "x", BESIDE)
    (top / "test" / "metadata.csv").write_text(META)
    hint = "no folder of a class .*; metadata.csv may name them: --labels=metadata.csv --classes="
    refused(hint, listing.in_class_folders, top, kind=DataError)
    (top / "test" / "metadata.csv").rename(top / "Diagnoses.CSV")
    hint = "Diagnoses.CSV may name them: --labels=Diagnoses.CSV --classes="
    refused(hint, listing.in_class_folders, top, kind=DataError)


NUMBERS = {  # values of a table with semicolons -> labels, or "!" and the error
    "89,5 -1,25 7": "89.5 -1.25 7",
    "1,5 1,234": "1.5 1.234",
    "1,234 5": "!1.png: '1,234' may have decimals or thousands: write 1.2340 or 1234$",
    "1.2340 5": "1.2340 5",  # as the error says
    "0,125 5": "0.125 5",  # no thousands begin with 0
    "1.234,5 7": "1.234,5 7",  # refused with the labels
    "5 1,2,3": "5 1,2,3",
    "841 41.480": "!row 3: A/2.png: '41.480' may have decimals or .*: write 41.4800 or 41480$",
    "841.000 41.480": "!'841.000' may have decimals or thousands: write 841.0000 or 841000$",
    "841 -41.480": "!'-41.480' may have .* write -41.4800 or -41480$",
    "841 41480": "841 41480",
    "841 41.4800 1.480": "841 41.4800 1.480",
    "841 0.125": "841 0.125",
    "841 1.5 1.234": "841 1.5 1.234",
    "841 1234.567 1.234": "841 1234.567 1.234",
    "5,5 1.234": "!'1.234' may have decimals or thousands: write 1,2340 or 1234$",
    "5,5 1,2340": "5.5 1.2340",  # as the error says
    "5,5 1.5e3": "!t.csv: decimal commas and points are mixed, '5,5' and '1.5e3'",
    "1.5 1,234": "!'1,234' may have",
    "1,2 1.3 1,4": "!t.csv: decimal commas and points are mixed, '1,2' and '1.3': write all alike$",
    "1e3 .5 1.234": "1e3 .5 1.234",
    "1.234.567 7": "1.234.567 7",  # refused with the labels
}


@pytest.mark.parametrize("values", NUMBERS)
def test_a_decimal_comma_is_a_point_where_it_can_be_nothing_else(tmp_path, values):
    top, columns = tree(tmp_path / "x", TWO), {"file": "file", "label": "label"}
    rows = [f"{x};{y}" for x, y in zip(TWO.split(), values.split(), strict=False)]
    (tmp_path / "t.csv").write_text("\n".join(["file;label", *rows]))
    read = lambda: listing.in_table(top, tmp_path / "t.csv", columns, number=True)  # noqa: E731
    if NUMBERS[values].startswith("!"):
        refused(NUMBERS[values][1:], read, kind=DataError)
    else:
        assert " ".join(x.label for x in read().examples) == NUMBERS[values]
    (tmp_path / "t.csv").write_text('file,label\nA/1.png,"89,5"\n')
    assert read().examples[0].label == "89,5"  # is refused: it may be one of thousands


POINTS = {  # a table of numbers that may be thousands -> whether it is refused
    "semicolons": ("t.csv", "file;label\nA/1.png;41.480\nA/2.png;12.250\n", True),
    "semicolons, as classes": ("t.csv", "file;label\nA/1.png;41.480\nA/2.png;841\n", False),
    "tabs and a whole number": ("t.tsv", "file\tlabel\nA/1.png\t41.480\nA/2.png\t841\n", True),
    "tabs and fixed digits": ("t.tsv", "file\tlabel\nA/1.png\t41.480\nA/2.png\t84.125\n", False),
    "commas": ("t.csv", "file,label\nA/1.png,41.480\nA/2.png,841\n", False),
    "JSON": ("t.jsonl", '{"file": "A/1.png", "label": 41.125}\n{"file": "A/2.png", "label": 841.0}',
        False),
    "JSON of three digits": ("t.jsonl", '{"file": "A/1.png", "label": 41.125}\n'
        '{"file": "A/2.png", "label": 841}', False),
    "JSON of texts": ("t.jsonl", '{"file": "A/1.png", "label": "41.480"}\n'
        '{"file": "A/2.png", "label": "841"}', True),
    "JSON of a comma": ("t.json", '[{"file": "A/1.png", "label": 41.125}, '
        '{"file": "A/2.png", "label": "89,5"}]', False),
    "JSON of a text and a number": ("t.json", '[{"file": "A/1.png", "label": "41.480"}, '
        '{"file": "A/2.png", "label": 841}]', False),
    "JSON, a comma in texts": ("t.json", '[{"file": "A/1.png", "label": "41.480"}, '
        '{"file": "A/2.png", "label": "89,5"}]', True),
    "Parquet of texts": ("t.parquet", ["41.480", "841"], True),
    "Parquet of decimals": ("t.parquet", [Decimal("41.480"), Decimal("841.000")], False),
    "Parquet of numbers": ("t.parquet", [41.125, 841.0], False),
}  # fmt: skip


@pytest.mark.parametrize("kind", POINTS)
def test_a_point_that_may_mark_thousands_is_refused_where_a_comma_is_decimal(tmp_path, kind):
    name, content, is_refused = POINTS[kind]
    top, columns = tree(tmp_path / "x", TWO), {"file": "file", "label": "label"}
    if name.endswith(".parquet"):
        pq.write_table(
            pa.table({"file": ["A/1.png", "A/2.png"], "label": content}), tmp_path / name
        )
    else:
        (tmp_path / name).write_text(content)
    number = "classes" not in kind
    read = lambda: listing.in_table(top, tmp_path / name, columns, number=number)  # noqa: E731
    if is_refused:
        refused("A/1.png: '41.480' may have decimals or thousands", read, kind=DataError)
    else:
        assert read().examples[0].label in ("41.480", "41.125")


HINTS = {  # a label that is no number -> what to write
    "89,5": "89.5", "1,234": "1.234 or 1234", "1.234,5": "1234.5", "1,234.5": "1234.5",
    "1 234": "1234", "1'234": "1234", "-1\u202f234\u202f567,8": "-1234567.8",
    "1.234.567": "1234567", "12.34.567": "", "x": "", "1,2,3": "", "": "",
}  # fmt: skip


@pytest.mark.parametrize("label", HINTS)
def test_a_label_with_marks_of_thousands_is_refused_with_what_to_write(tmp_path, label):
    options = OPTIONS._replace(kind="number", classes=())
    examples = [listing.Example("A/1.png", label, "", "train", 5)]
    hint = f": write {re.escape(HINTS[label])}" * bool(HINTS[label])
    refused(f"is not a finite number{hint}$", importing.check, examples, options, kind=DataError)


def test_a_folder_of_test_images_has_its_own_place(tmp_path):
    top, test = (
        tree(tmp_path / "x", TWO + "x.txt"),
        tree(tmp_path / "deep" / "y", "A/1.png B/9.png"),
    )
    read = lambda x, split: listing.in_class_folders(x, split=split)  # noqa: E731
    listed = listing.with_test(read(top, "train"), read(test, "test"), top, test, print)
    assert counts(listed.examples) == "test:A 1, test:B 1, train:A 2, train:B 2"
    assert listed.num_images == 6 and all((top / x.file).is_file() for x in listed.examples)
    tree(test, "C/1.png")
    both = lambda: listing.with_test(read(top, "train"), read(test, "test"), top, test, print)  # noqa: E731
    refused("y has classes that .*x lacks: C", both, kind=DataError)
    (test / "C" / "1.png").rename(test / "A" / "7.png")
    (test / "C").rmdir()
    (top / "A" / "8.png").symlink_to(test / "A" / "7.png")
    refused("7.png occurs again as A/8.png", both, kind=DataError)
    refused("leave out --test_folder", read, tree(tmp_path / "z", split("train")),
            "train", kind=DataError)  # fmt: skip
    refused("leave out --test_folder", read, tmp_path / "z", "test", kind=DataError)


@pytest.mark.parametrize(
    ("examples", "change", "message"),
    [
        ([("A/1.png", "A", "p"), ("B/1.png", "B", "p")], {}, "there is only one user"),
        ([("A/1.png", "A", "", "train"), ("A/2.png", "A", "", "test")], {}, "have the label 'A'"),
        ([("A/1.png", "A", "", "train", 1), ("A/2.png", "C", "", "test", 2)], {},
         r"row 2: A/2.png: label 'C' is not one of the classes \['A', 'B'\]$"),
        ([("A/1.png", "A", "", "train", 1), ("A/2.png", "A|C", "", "test", 2)], {},
         "which have one label an image: give a column of zeros and ones for each class$"),
        ([("A/1.png", "A", "", "train"), ("A/2.png", "B", "", "train")], {}, "for the test split"),
        ([("A/1.png", "A", "p"), ("A/2.png", "B", "")], {}, "A/2.png has no user, but others have"),
        ([("A/1.png", "A", "p", "train"), ("A/2.png", "B", "p", "test")], {},
         r"user 'p' has images in both splits, A/1.png \(train\) and A/2.png \(test\)"),
        ([("A/1.png", "x", "", "train", 5)], {"kind": "number"}, "row 5: .* not a finite number"),
        ([("A/1.png", "89,5", "", "train", 5)], {"kind": "number"}, "a finite number: write 89.5$"),
        ([("A/1.png", "1,0,1", "", "", 5)], {"kind": "several"}, "row 5: .* not a 0 or 1 for .*]$"),
        ([("A/1.png", "1", "", "", 5), ("A/2.png", "0,1", "", "", 6), ("B/1.png", "2", "", "", 7)],
         {"kind": "several"}, r"row 5: .* \(2 labels are wrong\)$"),
        ([("A/1.png", "1,2", "", "", 5)], {"kind": "several"}, "row 5: .* not a 0 or 1 for"),
        ([("A/1.png", "A")], {"classes": ("A",)}, r"two or more classes .*not \['A'\]"),
    ],
)  # fmt: skip
def test_what_is_listed_is_checked_before_any_file_is_written(tmp_path, examples, change, message):
    top, out = tree(tmp_path / "x", TWO), tmp_path / "out"
    many = [listing.Example(*x) for x in examples]
    refused(message, importing.run, top, many, out, OPTIONS._replace(**change), kind=DataError)
    assert not out.exists()


def test_what_cannot_be_read_is_left_out_by_its_name_or_refused(tmp_path, monkeypatch):
    top = tree(tmp_path / "x", split("train") + split("test") + "train/A/\xff.png "
               "train/B/3.png>none.png train/A/locked/4.png")  # fmt: skip
    os.mkfifo(top / "test" / "A" / "3.png")
    iterdir = Path.iterdir

    def locked(path):
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", locked)
    examples = listing.in_class_folders(top).examples
    manifest = importing.run(top, examples, tmp_path / "out", OPTIONS)
    why = {file: text.rpartition(": ")[2] for file, text in manifest["left_out"].items()}
    assert why == {
        "test/A/3.png": "not a readable file",
        "train/A/\\udcff.png": "the name is not UTF-8",
        "train/A/locked": "not a readable file",
        "train/B/3.png": "not a readable file",
    }
    assert manifest["num_examples"] == {"train": 4, "test": 4}
    strict = OPTIONS._replace(strict=True)
    refused("x/t.*: ", importing.run, top, examples, tmp_path / "no", strict, kind=DataError)
    of_no_test = [x for x in examples if x.split == "train" or x.file == "test/A/3.png"]
    refused("left for the test split", importing.run, top, of_no_test, tmp_path / "no", OPTIONS,
            kind=DataError)  # fmt: skip
    assert not (tmp_path / "no").exists()


def leaked(top, examples, near=False, options=OPTIONS):
    with ThreadPoolExecutor(1) as pool:
        found = leaks.lines(top, [listing.Example(*x) for x in examples], options, near, pool)
    return "\n".join(x for x in found if "fewer than 10 test images" not in x)


def test_pictures_in_two_places_are_counted_and_different_ones_are_not(tmp_path):
    top = tree(tmp_path, TWO)
    Image.open(top / "A" / "1.png").resize((90, 90)).save(top / "A" / "1.png")
    Image.open(top / "A" / "1.png").resize((45, 45)).save(top / "B" / "like.jpg", quality=75)
    tree(top, "B/copy.png=A/1.png")
    one = ("A/1.png", "A", "p", "train")
    twice = leaked(top, [one, ("B/copy.png", "B", "q", "test")])
    assert twice.count("(identical files)") == 3
    assert all(
        f"NOT PRIVATE: 1 picture has copies {x} (identical files)" in twice
        for x in ("in training and in test", "of several users", "with several labels")
    )
    alike = [one, ("B/like.jpg", "A", "q", "test"), ("A/2.png", "A", "r", "test")]
    assert leaked(top, alike) == ""
    assert leaked(top, alike, near=True).splitlines() == [
        f"NOT PRIVATE: 1 picture has copies {x} (they look alike)"
        for x in ("in training and in test", "of several users")
    ]
    others = [("A/1.png", "A", "p", "train"), ("A/2.png", "A", "q", "test"), ("B/1.png", "B", "r")]
    assert leaked(top, others, near=True) == ""
    single = leaked(top, [x[:2] for x in (one, ("B/copy.png", "A"))])
    assert "1 picture is a copy (identical files);" in single and "No users are named" in single


def test_users_of_most_images_or_of_two_spellings_are_counted(tmp_path):
    top = tree(tmp_path, TWO)
    users = ["p"] * 30 + ["q", "Q ", "r"]
    lines = leaked(top, [("none.png", "A", x) for x in users])
    assert "one user has 30 of 33 images" in lines and "keeps 4 images for K=1, 7 images" in lines
    assert "1 user spelled like another but for case or spaces" in lines
    assert leaked(top, [("none.png", "A", x) for x in "pqrs"]) == ""


def test_numbers_that_no_network_reaches_are_named_without_the_largest(tmp_path):
    options, large = OPTIONS._replace(kind="number", classes=()), "labels lie beyond 30, and"
    for most in ("-1e6", "123.5", "30.5"):  # one line, whoever has the largest
        lines = leaked(tmp_path, [("a", most, "p"), ("b", "2", "q")], options=options)
        assert large in lines and lines == leaked(
            tmp_path, [("a", "777", "p"), ("b", "2", "q")], options=options
        )
    assert leaked(tmp_path, [("a", "-3", "p"), ("b", "2", "q")], options=options) == ""


def test_classes_with_few_images_to_test_on_are_named(tmp_path):
    num = {("A", "train"): 9, ("A", "test"): 10, ("B", "train"): 99, ("B", "test"): 9}
    examples = [
        listing.Example(f"{x}{i}", x[0], "", x[1]) for x, n in num.items() for i in range(n)
    ]
    with ThreadPoolExecutor(1) as pool:
        few = [x for x in leaks.lines(tmp_path, examples, OPTIONS, False, pool) if "fewer" in x]
    assert few[0].startswith("NOT PRIVATE: ") and ": B (99 to train, 9 to test);" in few[0]


def test_users_that_the_data_name_are_protected_or_it_is_said(tmp_path, monkeypatch):
    spec = " ".join(f"{x}/p{i}/{i}.png" for i in range(40) for x in "AB")
    top, out = tree(tmp_path / "photographs", spec), tmp_path / "data"
    importing.run(top, listing.in_class_folders(top, users="folder").examples, out, OPTIONS)
    config = digits.get_config("dp_sgd")
    config.dataset.update({"name": "folder", "path": str(out)})
    config.update({"num_steps": 2, "accountant": "rdp", "expected_batch_size": 8})
    config.model.name, config.microbatch_size = "linear", 8
    trainer = loop.build(config)
    unprotected = run_lines.unprotected_users
    loud, way = "ε IS FOR ONE IMAGE, NOT FOR ONE PERSON", "these data name users"
    assert unprotected(config.dataset)[0].startswith(f"{loud}: {way}")
    whole = dataclasses.replace(trainer.plan.population, group_size=2)
    plan = dataclasses.replace(trainer.plan, population=whole)
    facts = [{"unit": x.unit, "num_examples_given": False} for x in (trainer.plan, plan)]
    words = [statement.render(x, "added") for x in facts]
    assert ["**It is not one person" in x for x in words] == [True, False]
    users = lambda **x: loading.make_dataset(ConfigDict({**config.dataset, **x})).users  # noqa: E731
    np.testing.assert_array_equal(users(group_size=2), users(group_size=2, groups="user"))
    assert users() is None
    (out / importing.MANIFEST).write_text('{"ids": ""}')  # as if no users had been named
    assert [loud in x and way not in x for x in unprotected(config.dataset)] == [True]
    assert users(group_size=2, memory="device") is None
