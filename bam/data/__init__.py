"""Data sets in memory, and the preparation of single examples."""
