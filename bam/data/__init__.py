"""Data sets, in memory or streamed, their users, and the views of single examples.

`catalogue` lists the data sets known by name; `sources/` reads their files, which may be a
stranger's. This folder imports only `core`.
"""
