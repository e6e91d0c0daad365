"""Fixed maps of images, which never saw private data, and the data sets of what they make.

It imports `core`, `data` and `models`.
"""
