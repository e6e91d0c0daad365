"""A module for each source of data. The authors of the files that they read need not be trusted."""
