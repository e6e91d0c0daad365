"""Fixed maps from images to features, fitted without private data, and data sets of features.

This folder imports `core`, `data` and `models`.
"""

PRIOR_SHA256 = (
    "c3adc19c4551de829e709036e09608826e7d7ec9ee5f9b090cd105f8ed3d9894"  # prior.safetensors
)
