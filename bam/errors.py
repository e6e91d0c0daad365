"""The error for a user's mistake, as against a fault of bam."""


class InputError(ValueError):
    """A value, file, config, data set or release that bam cannot take.

    The message is one line: it names the value and says what to do instead. Commands print it and
    end with exit status 2. Any other exception is a fault of bam or of the user's code, except
    `OSError` and the error for a missing package.
    """
