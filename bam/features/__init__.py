"""Fixed maps from images to features, fitted without private data, and data sets of features.

This folder imports `core`, `data` and `models`.
"""

PRIOR_SHA256 = (
    "d6c172ecafc75875b48749d330ea9ddb09eb194628d90ed8aa09e84da1864640"  # prior.safetensors
)
