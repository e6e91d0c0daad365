"""Fixed maps from images to features, fitted without private data, and data sets of features.

This folder imports `core`, `data` and `models`.
"""

PRIOR_SHA256 = (
    "05a248086a2102e342711323f382735074d436490129be992e809fce5cffaec7"  # prior.safetensors
)
