"""Data sets in memory, their users and features, and the preparation of single examples.

`sources/` reads files, also a stranger's. It imports none of the other folders.
"""
