"""`bam train`: from a config to a trained model, its metrics and files.

It imports `core`, `privacy`, `data`, `models` and `features`.
"""
