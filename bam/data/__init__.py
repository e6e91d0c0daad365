"""Data sets, in memory or streamed, their users, and the views of single examples.

`catalogue` has the data sets that are known by name; `sources/` reads their files, also a
stranger's. Of the other folders only `core` is imported.
"""
