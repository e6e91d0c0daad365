"""Each kind of image file becomes the pixels that a viewer shows, or one line says why not."""

import json

import pytest

from bam.data.pixels import Preprocessing
from tests.cases import refused

GREY = Preprocessing((4, 6), 1)


@pytest.mark.parametrize("record", [GREY, Preprocessing((16, 24), 3, (-1000.0, 400.5), "black")])
def test_a_record_of_preprocessing_comes_back_from_its_json(record):
    assert Preprocessing.from_json(json.loads(json.dumps(record.as_json()))) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 8}, "not iterable"),
        ({"size": [8, 3]}, r"size \(8, 3\): a height and a width from 4 to 4096"),
        ({"size": [8, 8, 8]}, "a height and a width"),
        ({"size": [8.0, 8]}, "a height and a width"),
        ({"channels": 2}, "2 channels"),
        ({"channels": True}, "True channels"),
        ({"window": [5, 5]}, "LOW < HIGH"),
        ({"window": [0, float("nan")]}, "two finite numbers"),
        ({"window": [0, float("inf")]}, "two finite numbers"),
        ({"window": [0, 10**400]}, "too large"),
        ({"window": [0]}, "two finite numbers"),
        ({"background": "mauve"}, "white or black"),
        ({"more": 1}, "unexpected"),
    ],
)
def test_json_that_is_no_preprocessing_is_one_line(change, message):
    refused(f"preprocessing .*{message}", Preprocessing.from_json, GREY.as_json() | change)
