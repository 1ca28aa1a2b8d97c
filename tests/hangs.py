"""A limit for what would otherwise hang. Speed is measured by `strata bench`, never by a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 30.0
"""What is guarded against takes minutes to days; what is called takes milliseconds, on a busy machine too."""


@contextmanager
def soon() -> Iterator[None]:
    """The block ends long before it could be called a hang."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SECONDS
