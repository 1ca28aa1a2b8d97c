"""What a backend made of the objects it was given, kept as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Handles:
    """What was made of objects, by their identity, for as long as they live."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def of(self, owner: object, make: Callable[[Any], Any]) -> Any:
        """`make(owner)` of the first call. It must not keep the owner alive."""
        found = self._made.get(id(owner))
        if found is None:
            found = self._made[id(owner)] = make(owner)
            weakref.finalize(owner, self._made.pop, id(owner)).atexit = False
        return found
