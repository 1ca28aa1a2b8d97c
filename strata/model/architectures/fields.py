"""Values from a config.json or GGUF metadata, which may hold anything: type and range are checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from strata.errors import FileFormatError, UnsupportedError

# Ceilings: several times the largest published model, small enough that nothing sized by them can hurt.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 27
MAX_ROUTED = 1 << 18
_OTHER = "choose another model; Strata refuses what it would compute wrongly"
_REQUIRED = object()


class Fields:
    """Checked access to a mapping. `source` names file and architecture in errors; `prefix` precedes keys.

    A JSON null counts as absent. Wrong type, range or a missing value without default: FileFormatError.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def raw(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        return self.values.get(self.prefix + name)

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self.raw(name) is not None

    def _value(self, name: str, default: Any, wanted: str) -> Any:
        value = self.raw(name)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise FileFormatError(f"{self.source}: {self.prefix}{name} is missing, expected {wanted}")
        return value

    def _bad(self, name: str, value: Any, wanted: str) -> FileFormatError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return FileFormatError(f"{self.source}: {self.prefix}{name} is {shown}, expected {wanted}")

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer in [low, high]."""
        wanted = f"an integer from {low} to {high}"
        value = self._value(name, default, wanted)
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Integral)
            or not low <= int(value) <= high
        ):
            raise self._bad(name, value, wanted)
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number in [low, high]."""
        wanted = f"a number from {low:g} to {high:g}"
        value = self._value(name, default, wanted)
        good = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not low <= value <= high:
            raise self._bad(name, value, wanted)
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """true or false."""
        value = self._value(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._value(name, default, "a string")
        if not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def items(self, name: str) -> Sequence[Any] | None:
        """A list, or None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        if (
            isinstance(value, (str, bytes))
            or not hasattr(value, "__len__")
            or not hasattr(value, "__getitem__")
        ):
            raise self._bad(name, value, "a list")
        return value  # type: ignore[no-any-return]

    def uniform(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer that may be written once per layer; layers that differ are refused by name."""
        value = self.raw(name)
        if value is None or isinstance(value, numbers.Number):
            return self.integer(name, default, low, high)
        distinct = {repr(item): item for item in self.items(name) or ()}
        if len(distinct) != 1:
            raise self.unsupported(f"{self.prefix}{name} that differs between layers")
        return Fields({name: next(iter(distinct.values()))}, self.source).integer(name, low=low, high=high)

    def section(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.raw(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._bad(name, value, "an object")
        return Fields(value, f"{self.source}: {name}")

    def unsupported(self, what: str) -> UnsupportedError:
        """The refusal of a feature, by name."""
        return UnsupportedError(f"{self.source}: {what} is not supported", remedy=_OTHER)

    def only(self, name: str, default: Any, allowed: Sequence[Any]) -> None:
        """Refuse every value but those of `allowed` (absent counts as `default`)."""
        value = self.raw(name)
        if value is None:
            value = default
        if value not in allowed:
            raise self.unsupported(f"{self.prefix}{name} {value!r}")
