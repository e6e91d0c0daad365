"""The clips that a config can name, and how PRIVACY.md describes the clipped gradient.

A row's function is `(plan, clip_norm, **options) -> clip`; no clip here reads the plan. Without
words, all that is known is that the norm of a clipped gradient is at most S.
"""

from bam.core.clipping import clip_by_l2_norm, clip_per_layer, normalize
from bam.named import Part

CLIPS = {
    "l2": Part(
        lambda plan, clip_norm: clip_by_l2_norm(clip_norm),
        words="scaled down to an L2 norm of at most C",
    ),
    "normalize": Part(
        lambda plan, clip_norm, gamma=0.01: normalize(clip_norm, gamma),
        ("gamma",),
        "scaled, up or down, to an L2 norm of at most C",
    ),
    "per_layer": Part(
        lambda plan, clip_norm: clip_per_layer(clip_norm),
        words="scaled down layer by layer, all together to an L2 norm of at most C",
    ),
}
