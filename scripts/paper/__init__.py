"""What reproduces the paper and the pages, each as `python -m scripts.paper.NAME`."""
