"""Errors that a user can put right."""


class InputError(ValueError):
    """What was given is not acceptable.

    The message is one line for the user: what was found, what is possible, what to do. The command line prints it
    without a traceback and exits with code 2.
    """


class CheckpointError(InputError):
    """A checkpoint, or what was asked of it, is not acceptable."""


class RunError(Exception):
    """Work stopped midway, for a reason that the message tells in one line. The command line exits with code 1."""


class RankError(RunError):
    """One of many processes stopped, for a reason that the others do not know: it must say so itself."""
