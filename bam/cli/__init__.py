"""The commands that a user runs, and what they share.

It imports any other folder but `testing`; nothing imports it but `scripts/`.
"""
