"""A model that answers by rule, for tests of what stands around a model. A token is a character."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from strata.core import FinishReason, Request


class FakeText:
    """Characters as they come; ends at the first stop text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.stopped = False

    def add(self, token: int) -> str:
        self.stopped = chr(token) in self.stops
        return "" if self.stopped else chr(token)

    def flush(self) -> str:
        return ""


class FakeEngine:
    """Answers "<last message in capitals>", one character every `delay` seconds."""

    def __init__(self, context: int, delay: float) -> None:
        self.context = context
        self.delay = delay
        self.calls = 0
        self.open = 0
        self.metrics = SimpleNamespace(requests={})

    def generate(self, request: Request, stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
        self.calls += 1
        self.open += 1
        limit = request.sampling.max_tokens
        try:
            text = "".join(map(chr, request.prompt)).rpartition("\x02")[2].upper()
            for count, character in enumerate(text):
                if stop():
                    request.finish_reason = FinishReason.ABORT
                    return
                if len(request.tokens) >= self.context or count == limit:
                    request.finish_reason = FinishReason.LENGTH
                    return
                time.sleep(self.delay)
                request.tokens.append(ord(character))
                yield ord(character)
            request.finish_reason = FinishReason.STOP
        finally:
            self.open -= 1


class FakeModel:
    """Stands in for LoadedModel."""

    name = "fake"
    stop_ids: frozenset[int] = frozenset()
    note = ""
    kv_place = "nowhere"

    def __init__(self, context: int = 10_000, delay: float = 0.0) -> None:
        self.context = context
        self.engine = FakeEngine(context, delay)

    def text_stream(self, request: Request, *, continuation: bool, shown: frozenset[int]) -> FakeText:
        return FakeText(request.sampling.stop)

    def encode_text(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for m in messages for c in f"\x01{m['role']}\x02{m['content']}"]
