"""What a run gives away: a canary in many short runs, whole runs, a run of one's own.

It imports any other folder but `testing`; no other imports it.
"""
