"""Limits of this process: how many files it opens, and how much time and memory a part of a test takes."""

import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def few_files(n: int) -> Iterator[None]:
    """Let this process open `n` more files, as shells do. It may raise that limit itself."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + n, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def bounded(megabytes: float, seconds: float = 5.0) -> Iterator[None]:
    """Check that what is done inside takes little processor time, and allocates little memory at once."""
    start = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes << 20
    assert time.process_time() - start < seconds
