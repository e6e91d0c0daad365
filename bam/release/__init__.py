"""What of a run may be published: weights, a statement of what they guarantee, reading them back.

It imports whatever `training` does, and `training`.
"""
