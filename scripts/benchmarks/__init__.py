"""Commands that measure time and memory, each as `python -m scripts.benchmarks.NAME`."""
