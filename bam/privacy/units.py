"""What neighbouring data sets differ in one of: an example, or a user with all of its examples."""

UNITS = ("example", "user")


def worded(text: str, unit: str) -> str:
    """A text that is about examples, as the units of privacy, said of another unit.

    Examples:
      >>> worded("an example is in a batch of 40 examples", "user")
      'a user is in a batch of 40 users'
      >>> worded("an example", "example")
      'an example'
    """
    if unit == "example":
        return text
    return text.replace("an example", f"a {unit}").replace("example", unit)
