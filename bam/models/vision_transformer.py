"""Vision Transformers, with the arithmetic of timm's and of Hugging Face's weights."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.errors import InputError


class VisionTransformer(nn.Module):
    """ViT with a class token; LayerNorm before each layer, exact GELU, a linear head.

    Nothing in it mixes examples: LayerNorm is of one token. `bam.models.pretrained` names its
    weights as other libraries do. The position embedding is of the input's size.
    With 0 classes there is no head, and the class token is returned.

    Source: Dosovitskiy et al. 2021; Ti and S of Touvron et al. 2021.
    """

    num_classes: int
    features: int
    num_heads: int
    depth: int = 12
    patch: int = 16

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of images whose sides are multiples of the patch."""
        n, height, width, channels = images.shape
        if height % self.patch or width % self.patch:
            raise InputError(
                f"a vision transformer of patches of {self.patch} needs sides that are multiples "
                f"of it, got {images.shape[1:]}"
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
    """Attention of all tokens of an image to each other, then a network of each token."""

    num_heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
        """The next layer's tokens."""
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
    """`(num_classes, width, depth=12) -> module` of a size; its width is the size's own."""

    def make(num_classes: int, width: int, depth: int = 12) -> nn.Module:
        del width
        return VisionTransformer(num_classes, features, num_heads, depth)

    return make


vit_ti16, vit_s16, vit_b16 = vit(192, 3), vit(384, 6), vit(768, 12)
