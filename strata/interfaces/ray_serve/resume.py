"""An answer that goes on at another replica when its own is lost: the same request, without what was sent.

That works because an answer depends on its request and its seed only (docs/server.md): a request that brings
no seed is given one before it is sent anywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_KEPT = ("id", "created")  # of the first attempt; others would be another answer to the client
_SEEDS = 1 << 31


def with_seed(body: bytes, draw: random.Random) -> bytes:
    """The body with a seed, where it is a JSON object that has none; else as it was."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(asked, dict) or asked.get("seed") is not None:
        return body
    return json.dumps({**asked, "seed": draw.randrange(_SEEDS)}).encode()


class ResumedEvents:
    """The events of a stream over several attempts, each of which begins with the first event again."""

    def __init__(self) -> None:
        self._sent = 0
        self._seen = 0
        self._rest = b""
        self._first: dict[str, Any] = {}

    def restart(self) -> None:
        """Another attempt begins."""
        self._seen, self._rest = 0, b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """What of the data the client does not have yet: whole events, and comments as they are."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                yield event + b"\n\n"
                continue
            self._seen += 1
            if self._seen > self._sent:
                self._sent = self._seen
                yield self._same_answer(event) + b"\n\n"

    def _same_answer(self, event: bytes) -> bytes:
        if event == b"data: [DONE]":
            return event
        content = json.loads(event[6:])
        if "id" not in content:  # an error
            return event
        if not self._first:
            self._first = {name: content[name] for name in _KEPT}
        if all(content[name] == value for name, value in self._first.items()):
            return event
        return b"data: " + json.dumps({**content, **self._first}, separators=(",", ":")).encode()
