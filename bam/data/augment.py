"""Augmentation multiplicity: K random views of one example, on the device.

The loss of an example is the mean over its views, taken before clipping, so any number of views
costs no privacy (De et al. 2022).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

FLIPS = ("none", "horizontal")


def views(
    key: Array, image: Shaped[Array, "h w c"], *, num_views: int, shift: int = 0, flip: str = "none"
) -> Shaped[Array, "views h w c"]:
    """K ≥ 1 random views of one image, same dtype: shifted, then perhaps mirrored.

    The key is that of this example at this step. Offsets are uniform on {-shift, …, shift} in both
    directions, independently; what lies beyond the border is the image reflected, without repeating
    the edge pixel. `flip` is "none", or "horizontal" (left–right) with probability 1/2.

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
    border = ((shift, shift), (shift, shift), (0, 0))
    padded = jnp.pad(image, border, mode="reflect") if shift else image

    def one_view(view_key: Array) -> Array:
        shift_key, flip_key = jax.random.split(view_key)
        top, left = jax.random.randint(shift_key, (2,), 0, 2 * shift + 1)
        view = jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)
        if flip == "none":
            return view
        return jnp.where(jax.random.bernoulli(flip_key), jnp.flip(view, 1), view)

    return jax.vmap(one_view)(jax.random.split(key, num_views))


def check(num_views: int, shift: int, flip: str) -> None:
    """Refuses augmentations that cannot be, with a ValueError that names the argument."""
    if num_views < 1:
        raise ValueError(f"augment.views must be at least 1, got {num_views}")
    if shift < 0:
        raise ValueError(f"augment.shift must be at least 0, got {shift}")
    if flip not in FLIPS:
        raise ValueError(f"unknown augment.flip {flip!r}; choose from {', '.join(FLIPS)}")
