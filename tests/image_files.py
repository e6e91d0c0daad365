"""Image files and folders of them, written for tests."""

import io
import os
import re
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image
from pydicom import uid

from bam.images import listing


def dicom(numbers, photometric="MONOCHROME2", syntax=uid.ExplicitVRLittleEndian, **tags):
    """A DICOM file of the numbers, with names that must not be kept."""
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = syntax
    data.SOPClassUID = data.SOPInstanceUID = uid.ComputedRadiographyImageStorage
    data.PatientName, data.PatientID = "Doe^Jane", " p7 "
    data.Rows, data.Columns = numbers.shape[:2]
    data.SamplesPerPixel = 3 if numbers.ndim == 3 else 1
    data.PlanarConfiguration = 0
    data.PhotometricInterpretation = photometric
    data.BitsAllocated = data.BitsStored = 8 * numbers.itemsize
    data.PixelRepresentation = int(numbers.dtype.kind == "i")
    data.PixelData = numbers.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    data.HighBit = data.BitsStored - 1
    file = io.BytesIO()
    data.save_as(file, enforce_file_format=True)
    return file.getvalue()


def tree(top, spec):
    """Writes paths, "A/1.png…" an image of its own, "x>y" a link to y, and "x=y" a copy of y."""
    for number, word in enumerate(spec.split()):
        place, link, target = re.fullmatch(r"([^>=]+)([>=]?)(.*)", word).groups()
        path = Path(os.fsdecode(os.fsencode(top) + b"/" + place.encode("latin-1")))
        path.parent.mkdir(parents=True, exist_ok=True)
        if link == ">":
            path.symlink_to(target)
        elif link:
            path.write_bytes((top / target).read_bytes())
        elif place.endswith("/"):
            path.mkdir(exist_ok=True)
        elif path.suffix.lower() in listing.SUFFIXES and ".nii" not in place:
            grey = np.random.default_rng(number).integers(0, 255, (12, 12), np.uint8)
            Image.fromarray(grey).save(path)
        else:
            path.write_bytes(b"x")
    return top


TWO = "A/1.png A/2.png B/1.png B/2.png "
