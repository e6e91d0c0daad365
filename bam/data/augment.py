"""Augmentation multiplicity: K random views of one example, on the device.

The loss of an example is the mean over its views, taken before clipping, so any number of views
costs no privacy (De et al. 2022).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from bam.errors import InputError

FLIPS = ("none", "horizontal")


def views(
    key: Array, image: Shaped[Array, "h w c"], *, num_views: int, shift: int = 0, flip: str = "none"
) -> Shaped[Array, "views h w c"]:
    """K ≥ 1 random views of one image, with its dtype: shifted, then perhaps mirrored.

    The key belongs to this example in this step. Offsets are uniform on {-shift, …, shift},
    independently in both directions. Beyond the border the image is reflected, without repeating
    the edge pixel. `flip` is "none", or "horizontal" (left–right) with probability 1/2. Pixels must
    be finite: NaN or infinity spreads over its row and its column.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> image = jnp.arange(4).reshape(1, 4, 1)
      >>> flipped = views(jax.random.key(0), image, num_views=8, flip="horizontal")
      >>> sorted({tuple(v.ravel().tolist()) for v in flipped})
      [(0, 1, 2, 3), (3, 2, 1, 0)]
    """
    check(num_views, shift, flip)
    if shift == 0 and flip == "none":
        return jnp.broadcast_to(image, (num_views, *image.shape))
    keys = jax.vmap(jax.random.split)(jax.random.split(key, num_views))
    begin = jax.vmap(lambda k: jax.random.randint(k, (2,), 0, 2 * shift + 1))(keys[:, 0]) - shift
    rows, columns = (_reflect(begin[:, axis], image.shape[axis]) for axis in (0, 1))
    if flip != "none":
        mirrored = jax.vmap(jax.random.bernoulli)(keys[:, 1])
        columns = jnp.where(mirrored[:, None], columns[:, ::-1], columns)
    # Products with zeros and ones pick the pixels exactly. A TPU would take slices at different
    # places one after the other.
    small = image.dtype in (jnp.uint8, jnp.int8, jnp.bool_)
    pixels = image.astype(jnp.bfloat16) if small else image

    def pick(letters: str, places: Int[Array, "views size"], of: Array) -> Array:
        chosen = jax.nn.one_hot(places, places.shape[1], dtype=of.dtype)
        return jnp.einsum(letters, chosen, of, precision="highest", preferred_element_type=of.dtype)

    picked = pick("vri,iwc->vrwc", rows, pixels)
    return pick("vsw,vrwc->vrsc", columns, picked).astype(image.dtype)


def with_mixtures(
    key: Array, inputs: Float[Array, "views h w c"], num_mixtures: int
) -> Float[Array, "inputs h w c"]:
    r"""The K views of one example, then mixtures $\alpha v_i + (1 - \alpha) v_j$ of two of them.

    i and j are two different views, drawn uniformly, and α is uniform on [0, 1]. The label is that
    of the views. Other examples take no part, so mixtures cost no privacy.

    Source: DP-MixSelf of Bao et al. 2023 (DP-Mix, NeurIPS).
    """
    if not num_mixtures:
        return inputs
    first_key, second_key, alpha_key = jax.random.split(key, 3)
    num_views = len(inputs)
    first = jax.random.randint(first_key, (num_mixtures,), 0, num_views)
    further = jax.random.randint(second_key, (num_mixtures,), 1, num_views)
    second = (first + further) % num_views
    alpha = jax.random.uniform(alpha_key, (num_mixtures, 1, 1, 1), inputs.dtype)
    return jnp.concatenate([inputs, alpha * inputs[first] + (1 - alpha) * inputs[second]])


def _reflect(begin: Int[Array, " views"], size: int) -> Int[Array, "views size"]:
    """Returns the `size` row numbers of each view from `begin`, reflected into the image."""
    period = max(1, 2 * (size - 1))
    row = (begin[:, None] + jnp.arange(size)) % period
    return jnp.minimum(row, period - row)


def check(num_views: int, shift: int, flip: str, num_mixtures: int = 0) -> None:
    """InputError, naming the argument, for an augmentation out of range."""
    if num_views < 1:
        raise InputError(f"augment.views must be at least 1, got {num_views}")
    if num_mixtures < 0 or (num_mixtures and num_views < 2):
        raise InputError(
            f"augment.mixtures need augment.views of at least 2, got {num_mixtures} and {num_views}"
        )
    if shift < 0:
        raise InputError(f"augment.shift must be at least 0, got {shift}")
    if flip not in FLIPS:
        raise InputError(f"unknown augment.flip {flip!r}; choose from {', '.join(FLIPS)}")
