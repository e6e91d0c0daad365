"""Who is one person: ids as users write them, read so that one person has one."""

import contextlib
import functools
import numbers
import re
import unicodedata
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from bam.errors import InputError

# Texts for a missing value, without case: of NumPy, pandas, Python, R and databases.
MISSING = {"na", "n/a", "null", "none", "nat", "<na>", "(null)", "[null]", "\\n"}
# Those with many spellings: "n. a."; a spreadsheet's errors in any language, as "#N/A", "#NV",
# "#NOM?" and "Err:502"; infinities and NaN, also of C, as "-nan(ind)" and "1.#QNAN".
_MISSING_SPELLED = re.compile(
    r"n\. ?a\.?|#[¡¿]?[^\W\d_][\w/]*[!?]|#n/?[av]|#n/a n/a|err:[0-9]+"
    r"|[-+]?(inf|infinity|nan|nan\([a-z]*\)|1\.#[a-z]+0*)"
)
# Integers for a missing value: pandas' code, and what NumPy makes of it and of NaN or NaT in 32 and
# 64 bits, signed and unsigned. (It also makes 0 of some NaN in 32 bits, which may be an id.)
MISSING_NUMBERS = (-1, -(2**31), -(2**63), 2**31, 2**63, 2**32 - 1, 2**64 - 1)
_MISSING_DIGITS = {str(x) for x in MISSING_NUMBERS}
# What is dropped at the ends of an id: white space, NUL, and characters without width.
_ENDS = (
    "".join(x for x in map(chr, range(0x3001)) if x.isspace()) + "\0\u200b\u200e\u200f\u2060\ufeff"
)
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)([.,]0*)?")
_EXPONENT = re.compile(r"(?=.*[-+.,])[-+]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)e[-+]?[0-9]+", re.I)
_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}[.,]000")
_NUMBERS = (numbers.Integral, float, np.floating, Decimal)
_AS_TEXT = (
    "read the column as text (in pandas with dtype=str; in a spreadsheet format the cells as text "
    "before the ids are put in)"
)
_DAMAGED = "has a NUL or is not UTF-8: save the ids as text in UTF-8, or as integers"


def user_id(value: object) -> str:
    """Returns the text that all ids of one person share, or "" for a missing id.

    Unicode is composed, and white space at the ends is dropped. Whole numbers are equal however
    they are written, because programs add and drop leading zeros and ".0". All persons with a
    missing id would be one user: those with a text that `is_missing`, or with `MISSING_NUMBERS`.

    Args:
      value: an integer, a float, a `Decimal`, a text, bytes or a UUID; None or masked: missing.

    Raises:
      InputError: for an id that may stand for several persons: a fraction, a float from 2^53 on
        (2^24 and 2^11 in 32 and 16 bits), a number with an exponent, "1.000"; for another type; and
        for text that is not UTF-8 or has a NUL before its end, and bytes with any NUL.

    Examples:
      >>> [user_id(x) for x in ("p1 ", 12, 12.0, "0012", "N/A", -1)]
      ['p1', '12', '12', '12', '', '']
    """
    if value is None or value is np.ma.masked:
        return ""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0:
        value = np.asarray(value)[()]
    if isinstance(value, bytes):
        value = _decode(value)
    if not isinstance(value, bool) and isinstance(value, _NUMBERS):
        value = _digits(value)
    text = _read(str(value))
    if text and not isinstance(value, str | uuid.UUID):
        raise InputError(
            f"id {text[:80]!r} is of type {type(value).__name__}, not a number or text"
        )
    return text


def read_id(value: object, location: str) -> str:
    """Returns the `user_id` of a row.

    InputError at `location`, in one line, if the row has no id.
    """
    try:
        name = user_id(value)
    except InputError as error:
        raise InputError(f"{location}: {error}") from error
    if not name:
        plain = value.item() if isinstance(value, np.generic) else value
        instead = "masked" if value is np.ma.masked else repr(plain)[:80]
        raise InputError(
            f"{location} has no user: its id is {instead}, and all without an id would be one "
            "user. Give every user an id, or leave these out"
        )
    return name


def is_missing(text: str) -> bool:
    """Returns whether a text stands for a missing value.

    It is a word for a missing value, or has neither a letter nor a digit.

    Examples:
      >>> [is_missing(x) for x in ("", "--", "N/a", "nancy", "0")]
      [True, True, True, False, False]
    """
    plain = text.casefold()
    is_word = plain in MISSING or _MISSING_SPELLED.fullmatch(plain) is not None
    return is_word or not any(map(str.isalnum, text))


def _decode(value: bytes) -> str:
    """Returns bytes as text.

    InputError if they are not UTF-8, or have a NUL, as UTF-16 has.
    """
    with contextlib.suppress(UnicodeDecodeError):
        if b"\0" not in value:
            return value.decode()
    raise InputError(f"id {value[:80]!r} {_DAMAGED}")


def _digits(value: Any) -> str:
    """Returns a number in digits, or "nan" for NaN.

    InputError if rounding may have made it of other numbers.
    """
    if isinstance(value, Decimal) and not value.is_finite():
        value = float("nan" if value.is_nan() else value)  # `float` refuses a signalling NaN
    if value != value:
        return "nan"
    if isinstance(value, float | np.floating):
        end = 2 ** (np.finfo(type(value)).nmant + 1)
        if abs(value) >= end:
            raise InputError(
                f"id {value} is a float of at least 2^{end.bit_length() - 1}, where rounding gives "
                f"several persons one id: {_AS_TEXT}"
            )
    if value != int(value):
        raise InputError(
            f"id {value} is a fraction, and may stand for several persons, as 1.1 for 1.1 and "
            f"1.10: {_AS_TEXT}"
        )
    return f"{Decimal(int(value)):f}"  # `str` refuses 5,000 digits


@functools.lru_cache(2**16)  # a user may have many rows
def _read(text: str) -> str:
    """Returns the `user_id` of a text."""
    is_utf8 = not any("\ud800" <= x <= "\udfff" for x in text)  # these stand for damaged bytes
    if not is_utf8 or "\0" in text.rstrip(_ENDS):
        raise InputError(f"id {text[:80]!r} {_DAMAGED}")
    text = unicodedata.normalize("NFC", text).strip(_ENDS)
    if is_missing(text):
        return ""
    if _EXPONENT.fullmatch(text):
        raise InputError(
            f"id {text[:80]!r} is a rounded number, which several persons may share: {_AS_TEXT}. "
            "If it is a code, put a letter before it"
        )
    if _THOUSANDS.fullmatch(text):
        number = text[:-4]
        raise InputError(f"id {text!r} may be {number} or {number}000: {_AS_TEXT}")
    if not (whole := _WHOLE.fullmatch(text)):
        return text
    sign, digits, point = whole.groups()
    if point and (len(digits) > 16 or int(digits) >= 2**53):
        raise InputError(
            f"id {text[:80]!r} was a float of at least 2^53, where rounding gives several persons "
            f"one id: {_AS_TEXT}"
        )
    number = "-" * (sign == "-" and digits != "0") + digits
    return "" if number in _MISSING_DIGITS else number


def number_users(groups: Any) -> Int64[np.ndarray, " rows"]:
    """Returns the number of each row's user, from 0.

    Users with whole numbers come first, by value, and then the others.

    Args:
      groups: `[rows]`, the ids; see `user_id`.

    Raises:
      InputError: for another shape, and for a row without an id or with one that `user_id` refuses.

    Examples:
      >>> number_users(["b", "10", 9, "b ", 10.0]).tolist()
      [2, 1, 0, 2, 1]
    """
    masked = isinstance(groups, np.ma.MaskedArray) and groups.ndim == 1
    if masked or _is_plain_sequence(groups):
        # Not an array of one dtype: it would turn 2^60 beside 0.5 into a float, and all into text.
        ids = np.fromiter(iter(groups), object)
    else:
        ids = np.asarray(groups)
    if ids.ndim != 1 or ids.dtype.kind not in "iufUSO":
        raise InputError(f"groups must be [rows] integers or texts, got {ids.dtype}{ids.shape}")
    if ids.dtype.kind in "iu":
        ends = np.iinfo(ids.dtype)
        missing = [x for x in MISSING_NUMBERS if ends.min <= x <= ends.max]
        for row in np.flatnonzero(np.isin(ids, np.array(missing, ids.dtype)))[:1]:
            read_id(ids[row], f"row {row} (from 0)")
        return np.unique(ids, return_inverse=True)[1]
    names = [read_id(x, f"row {row} (from 0)") for row, x in enumerate(ids)]
    places = {name: place for place, name in enumerate(sorted(set(names), key=_in_order))}
    return np.array([places[x] for x in names], np.int64)


def _is_plain_sequence(groups: Any) -> bool:
    """Returns whether ids are in a sequence that is no array of one dtype.

    Such a sequence is a list or a deque.
    """
    if isinstance(groups, str | Mapping) or hasattr(groups, "__array__"):
        return False
    try:
        memoryview(groups)  # the items of `array.array` would not tell how many bits a float has
    except TypeError:
        return hasattr(groups, "__len__") and hasattr(groups, "__getitem__")
    return False


def _in_order(name: str) -> tuple[bool, Decimal, str]:
    """Returns a sort key: whole numbers by value, then other texts. It depends on no other user."""
    is_whole = _WHOLE.fullmatch(name) is not None
    return not is_whole, Decimal(name if is_whole else 0), name
