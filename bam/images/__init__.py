"""Turns a folder of photographs or scans into a data set: lists, decodes, imports and checks files.

This folder imports `core`, `privacy` and `data`. Only the commands and `bam.release.predict` import
it.
"""
