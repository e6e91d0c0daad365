"""Runs that are compared: trained once each, set beside each other by seed, and drawn.

Imports `bam.training` and what that imports. `bam.cli.sweep` is the command.
"""
