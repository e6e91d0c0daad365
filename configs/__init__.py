"""Experiment configurations, one file per data set: `configs/NAME.py:METHOD`."""
