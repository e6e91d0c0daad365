"""Vision Transformers that compute the same as those of timm and Hugging Face transformers."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.errors import InputError

PATCH = 16  # pixels of a side of a patch


class VisionTransformer(nn.Module):
    """ViT with a class token, LayerNorm before each layer, exact GELU and a linear head.

    It does not mix examples, because LayerNorm normalises each token on its own. The size of the
    input fixes the size of the position embedding. `bam.models.pretrained` converts weights of
    other libraries. With 0 classes there is no head, and the class token is returned.

    Source: Dosovitskiy et al. 2021; sizes Ti and S: Touvron et al. 2021.
    """

    num_classes: int
    features: int
    num_heads: int
    depth: int = 12
    patch: int = PATCH

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images whose sides are multiples of the patch size."""
        n, height, width, channels = images.shape
        if height % self.patch or width % self.patch:
            raise InputError(
                f"a vision transformer needs images with sides that are multiples of {self.patch}, "
                f"got {images.shape[1:]}"
            )
        size, rows, columns = self.patch, height // self.patch, width // self.patch
        patches = images.reshape(n, rows, size, columns, size, channels).swapaxes(2, 3)
        x = nn.Dense(self.features, name="patch")(patches.reshape(n, rows * columns, -1))
        near_zero = nn.initializers.normal(0.02)
        token = self.param("class_token", near_zero, (1, 1, self.features))
        position = self.param("position", near_zero, (1, rows * columns + 1, self.features))
        token = jnp.broadcast_to(token.astype(x.dtype), (n, 1, self.features))
        x = jnp.concatenate([token, x], axis=1) + position
        for i in range(self.depth):
            x = _Block(self.num_heads, name=f"block_{i}")(x)
        x = _norm("norm")(x)[:, 0]
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x


class _Block(nn.Module):
    """Self-attention over the tokens of an image, then a two-layer network on each token."""

    num_heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """Returns the tokens after this block."""
        features = x.shape[-1]
        qkv = nn.Dense(3 * features, name="qkv")(_norm("norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, self.num_heads, -1), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + nn.Dense(features, name="proj")(attended)
        hidden = nn.Dense(4 * features, name="fc1")(_norm("norm2")(x))
        return x + nn.Dense(features, name="fc2")(nn.gelu(hidden, approximate=False))


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-6, name=name)


def vit(features: int, num_heads: int) -> Callable[..., nn.Module]:
    """Returns a maker `(num_classes, width=1, depth=12) -> module`, which ignores the width."""

    def make(num_classes: int, width: int = 1, depth: int = 12) -> nn.Module:
        del width
        return VisionTransformer(num_classes, features, num_heads, depth)

    return make


vit_ti16, vit_s16, vit_b16 = vit(192, 3), vit(384, 6), vit(768, 12)
