"""Give errors of the tokenizers library as one line, including the panics of its Rust code.

A panic, such as of a regular expression that takes too many steps on a text, is a `pyo3_runtime.PanicException`. That
is a BaseException, so `except Exception` lets it pass, and it cannot be pickled.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from model.common.errors import InputError


@contextmanager
def refusing_tokenizer_errors(message: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Raise an InputError, `message` and the reason, in place of what the library raises. Lack of memory passes."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:  # the library raises no narrower class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message} ({' '.join(str(error).split())}).") from error
