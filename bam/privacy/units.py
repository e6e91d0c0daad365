"""What neighbouring data sets differ in one of, an example or a user with all of its examples.

Here are the words for it, in which plans and statements differ.
"""

import re
from typing import NamedTuple

from bam.files import JsonMapping
from bam.privacy.mechanisms import adjacency_of


class Unit(NamedTuple):
    """What is said of a unit of privacy; `{k}` is the most examples used of a user."""

    name: str
    many: str  # N counts …
    each: str  # privacy for …
    protected: str  # what that is
    others: str  # an attacker may have every other …
    several: str  # whoever has more than one; `{two}` is the guarantee of two
    public: str  # what is public beside the number of units
    fact: str  # the unit, in a table
    gradient: str  # what is bounded
    person: str  # what data have if people are claimed to be protected


UNITS = {
    "example": Unit(
        name="example",
        many="training examples",
        each="each single training example",
        protected="Each single training example: one row of the data set, that is one image or\n"
        "record with its label.",
        others="training example",
        several="*People with several examples.* The promise is per example. With two, a person "
        "has\n  {two} instead; with more examples, less protection still.",
        public="their size and format",
        fact="one training example",
        gradient="each example's gradient is",
        person="one example per person",
    ),
    "user": Unit(
        name="user",
        many="users",
        each="each single user, for all training examples of that user together",
        protected="Each single user: all training examples that carry one id, together. At most\n"
        "{k} of each user's were used.",
        others="user's training examples",
        several="*People with several ids.* The promise is per id, for all of its examples "
        "together. With\n  two ids, a person has {two} instead; with more, less protection still.",
        public="the most\n  examples used of each ({k}), the size and format of examples",
        fact="one user: all training examples with one id, of which at most {k} are used",
        gradient="the gradient of each user's mean loss is",
        person="one id per person",
    ),
}


class Neighbours(NamedTuple):
    """What the words of a statement say of two data sets that differ in one example, or user."""

    could: str  # the same weights could have come out …
    tests: str  # somebody tests whether …
    otherwise: str  # … of weights that were trained …
    versions: str  # what the guarantee of two examples says of two versions of one
    sensitivity: str  # what S is
    number: str  # what N is


_VERSIONS = " The same pair limits how\n  well two versions of one example can be told apart."
_AMONG = "one given example was among the training\nexamples"
_MOVES = "how far one example moves the sum, in L2"
NEIGHBOURS = {
    "zero_out": Neighbours(
        "with nothing\nin the place of that example",
        _AMONG,
        "with nothing in its place",
        _VERSIONS,
        _MOVES,
        "number of {many}",
    ),
    "add_or_remove_one": Neighbours(
        "without that example",
        _AMONG,
        "without the example",
        _VERSIONS,
        _MOVES,
        "upper bound on the number of {many}, fixed without counting",
    ),
    "replace_one": Neighbours(
        "with another example in its place",
        _AMONG + ", or another given one in its place",
        "with the other",
        "",
        "the longest gradient of one example; another in its place moves the sum by up to 2S",
        "number of {many}",
    ),
}


def neighbours_of(plan: JsonMapping) -> Neighbours:
    """What the words of a recorded plan's statement say of its neighbours."""
    unit, words = unit_of(plan), NEIGHBOURS[adjacency_of(plan)]
    return Neighbours(*(worded(x, unit.name).replace("{many}", unit.many) for x in words))


def unit_of(plan: JsonMapping) -> Unit:
    """What is said of the unit of a recorded plan, of an earlier version too; or a ValueError."""
    name, size = plan.get("unit", "example"), plan.get("group_size", 0)
    check(name, size)
    return Unit(*(text.replace("{k}", f"{size}") for text in UNITS[name]))


def check(name: object, group_size: object) -> None:
    """Refuses, with a ValueError, a unit that there is not, or with no such k; 0 of examples."""
    of_users = name == "user" and type(group_size) is int and group_size > 0
    if not of_users and (name, group_size) != ("example", 0):
        raise ValueError(f"a unit of privacy {name!r} with a group_size of {group_size!r} is none")


def worded(text: str, unit: str) -> str:
    """A text that is about examples, as the units of privacy, said of another unit.

    Examples:
      >>> worded("an example is in a batch of 40 examples", "user")
      'a user is in a batch of 40 users'
      >>> worded("an example", "example")
      'an example'
      >>> worded("For example, an example's own key", "user")
      "For example, a user's own key"
    """
    said = {"an example": f"a {unit}", "example": unit}
    phrases = r"\b[Ff]or example\b|\ban example|example"
    return text if unit == "example" else re.sub(phrases, lambda x: said.get(x[0], x[0]), text)
