"""Fixed maps from images to features, fitted without private data, and data sets of features.

This folder imports `core`, `data` and `models`.
"""

PRIOR_SHA256 = (
    "78ddd161ef91566c3e5503e596d672e6629998518fc7eb916716a9f94ddd760f"  # prior.safetensors
)
