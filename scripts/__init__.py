"""Commands that a user runs, each as `python -m scripts.NAME` from the root."""
