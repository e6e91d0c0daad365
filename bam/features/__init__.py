"""Fixed maps of images, which never saw private data, and the data sets of what they make.

It imports `core`, `data` and `models`.
"""

PRIOR_SHA256 = "05a248086a2102e342711323f382735074d436490129be992e809fce5cffaec7"  # of its file
