"""Define the errors that the command line prints as one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """The input is not acceptable.

    The message is one line for the user: what was found, what is possible, what to do. The command line prints it
    without a traceback and exits with code 2.
    """


class CheckpointError(InputError):
    """A checkpoint, or an operation requested on it, is not acceptable."""


class InvalidValueError(CheckpointError):
    """A value in a checkpoint's file has another type or range than it can have.

    The file has to be corrected: a conversion that does not read the value would copy it into the output.
    """


class NotNativeError(CheckpointError):
    """A setting of a native family that the native decoder does not implement. transformers' classes do."""


@contextmanager
def prefix_path(checkpoint: Path) -> Iterator[None]:
    """Put a checkpoint's path before the message of a CheckpointError that does not contain it."""
    whole_path = rf"(?<![\w./-]){re.escape(str(checkpoint))}(?=/|[,;:.)'\"`]*(\s|$))"
    try:
        yield
    except CheckpointError as error:
        if re.search(whole_path, str(error)):
            raise
        raise type(error)(f"{checkpoint}: {error}") from error


class RunError(Exception):
    """Work stopped midway; the message states the reason in one line. The command line exits with code 1."""


class LostProcessError(RunError):
    """Another process of a run is unreachable, probably because it has ended."""


class RankError(RunError):
    """One of many processes stopped for a reason of its own, so this process prints the message itself."""


def is_device_error(error: BaseException) -> bool:
    """Return whether a GPU or its libraries failed, such as by an ECC error.

    A failed assertion on the device (an index out of range) is a fault of the program or of its input, not of the GPU.
    """
    if "device-side assert" in str(error):
        return False
    marks = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "HIP error")
    is_torchs = type(error).__name__ == "AcceleratorError" or any(mark in str(error) for mark in marks)
    return isinstance(error, RuntimeError) and is_torchs


def is_lost_process(error: BaseException) -> bool:
    """Return whether an error means that another process of a training is unreachable, probably because it has ended.

    gloo raises a RuntimeError that names its source file, NCCL a DistBackendError. NCCL's watchdog may also end the
    process itself, after the timeout of collectives, and the launcher 30 seconds after another process has failed.
    """
    is_torchs = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    is_lost = isinstance(error, RuntimeError) and (is_torchs or "gloo/transport" in str(error))
    return isinstance(error, LostProcessError) or (is_lost and not is_shared_gpu(error))


def is_shared_gpu(error: BaseException) -> bool:
    """Return whether NCCL refused two processes on one GPU."""
    return isinstance(error, RuntimeError) and "Duplicate GPU detected" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether numpy, or torch on any device, could not allocate memory. Needs no torch."""
    # CUDA and NCCL say "out of memory", in errors of several types. cuBLAS and cuDNN name a status.
    marks = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    is_torchs = type(error).__name__ == "OutOfMemoryError" or any(mark in str(error) for mark in marks)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_torchs)
