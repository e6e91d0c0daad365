"""Numbers as text, rounded to the side that makes the weaker claim."""

import decimal


def round_up(value: float, form: str) -> str:
    """Returns a number as text that is never below it, for ε, δ and q.

    The shortest decimal form counts as the number itself. `form` is a format of `float`, such as
    ".4g".

    Examples:
      >>> round_up(1.4e-5, ".1g"), round_up(2.99991, ".4g"), round_up(1e-5, ".3g")
      ('2e-05', '3', '1e-05')
    """
    return _format(value, form, decimal.ROUND_CEILING)


def round_down(value: float, form: str) -> str:
    """Returns a number as text that is never above it, for noise, as `round_up` for ε."""
    return _format(value, form, decimal.ROUND_FLOOR)


def _format(value: float, form: str, rounding: str) -> str:
    with decimal.localcontext() as context:
        context.rounding = rounding
        exact = decimal.Decimal(repr(float(value)))  # the shortest text that is this number
        text = format(exact, form)
    return format(float(text), form)
