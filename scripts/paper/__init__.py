"""Scripts that reproduce the paper and the pages: `python -m scripts.paper.NAME`."""
