"""Commands that reproduce the paper and that measure, each as `python -m scripts.NAME`."""
