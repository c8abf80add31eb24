"""The one error type for input that a user can put right."""


class CheckpointError(ValueError):
    """A checkpoint, or what was asked of it, is not acceptable.

    The message is one line for the user: what was found, what is possible, what to do. The command line prints it
    without a traceback and exits with code 2.
    """
