"""Releases: export a run's weights with their guarantee, read them back, and report on a run.

Imports `bam.training` and the packages below it.
"""
