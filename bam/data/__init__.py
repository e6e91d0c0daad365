"""Data sets, in memory or streamed, their users, and the views of single examples.

`catalogue` lists the data sets that have a name here; `sources/` reads their files, whose authors
need not be trusted. This folder imports only `core`.
"""
