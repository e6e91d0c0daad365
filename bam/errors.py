"""The error that a user causes, as against a fault of bam."""


class InputError(ValueError):
    """A value, file, config, data set or release that bam cannot take, in one line.

    The message says which it is and what to do instead. Whatever else is raised, but for errors of
    the system (`OSError`) and packages that are missing, is a fault of bam or of code of a user's
    own. Commands print an `InputError` as one line, and end with exit status 2.
    """
