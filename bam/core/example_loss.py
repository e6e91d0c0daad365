"""The loss of one example, whose mistakes are named while JAX traces it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam.core import pytree
from bam.errors import InputError


def guard_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss `(params, example) -> number` that names its mistakes.

    The result is an InputError unless it is one real number. An exception of the loss gets a note
    with the shapes of its example, because a loss of a whole batch fails there.
    """

    def loss(params: PyTree, example: PyTree) -> Any:
        try:
            value = loss_fn(params, example)
        except InputError:
            raise
        except Exception as error:
            note = f"The loss was called with ONE example, {_in_words(example)}, not with a batch: "
            note += "a network of batches takes x[None], and returns logits[0]."
            if not any("ONE example" in x for x in getattr(error, "__notes__", ())):
                error.add_note(note)  # once, where a user's loss calls that of a row
                if isinstance(error, KeyError) and error.args[:1] in (("key",), ("step",)):
                    error.add_note("`private.batches(data, keys=True)` adds key and step.")
            raise
        kind, dtype = _kind(value), getattr(value, "dtype", type(value))
        is_number = kind.endswith("[]") or isinstance(value, float)
        if is_number and jnp.issubdtype(dtype, jnp.floating):
            return value
        raise InputError(
            f"the loss returns {kind} for ONE example, {_in_words(example)}: return one float, as "
            "the mean over pixels or views, and nothing else"
        )

    return loss


def _in_words(example: PyTree) -> str:
    """Returns the names, types and shapes of an example's arrays."""
    leaves = zip(pytree.names(example), jax.tree.leaves(example), strict=True)
    return ", ".join(f"{name} {_kind(x)}".strip() for name, x in leaves) or "without arrays"


def _kind(value: object) -> str:
    """Returns the type and shape of an array, or the name of another type."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
