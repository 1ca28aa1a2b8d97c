"""An answer whose content is one call as bare JSON: what a grammar makes of models without a known format."""

from __future__ import annotations

from strata.interfaces.server.formats.json_call import JsonCall
from strata.interfaces.server.formats.tagged import CallCounter
from strata.interfaces.server.output import OutputParser, Part


class BareCall:
    """inner: tells reasoning from content."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self._counter = CallCounter()
        self._call = JsonCall()
        self._raw = ""

    def add(self, text: str) -> list[Part]:
        """What is certain now."""
        return self._read(self._inner.add(text))

    def finish(self) -> list[Part]:
        """The rest. What was cut off before it became a call is content."""
        parts = self._read(self._inner.finish()) + self._counter.parts(self._call.finish())
        return parts if self._counter.count or not self._raw else [*parts, Part(self._raw)]

    def _read(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            self._raw += part.text
            found += self._counter.parts(self._call.add(part.text)) if part.text else [part]
        return found
