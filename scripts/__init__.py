"""Command-line programs; run each as `python -m scripts.NAME` from the root."""
