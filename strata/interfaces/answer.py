"""One answer: the engine's token ids become text, stop texts end it, and its times are taken."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from strata.core import FinishReason, Request, SamplingParams
from strata.errors import ContextOverflowError

if TYPE_CHECKING:
    from strata.interfaces.models import LoadedModel


class Answer:
    """Iterate `pieces` once; text, token counts, times and finish_reason are final afterwards.

    Raises ContextOverflowError at once when the prompt leaves no room for a token.
    """

    def __init__(self, model: LoadedModel, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        if len(prompt) >= model.context:
            raise ContextOverflowError(len(prompt), model.context)
        self.model = model
        self.request = Request(request_id, prompt, sampling, model.stop_ids)
        self.text = ""
        self.tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.finish_reason: FinishReason | None = None

    @property
    def sampling(self) -> SamplingParams:
        """What the request asked for."""
        return self.request.sampling

    @property
    def context_full(self) -> bool:
        """Whether generation ended because the context has no room left."""
        full = len(self.request.tokens) >= self.model.context
        return self.finish_reason is FinishReason.LENGTH and full

    def pieces(self, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Text as it becomes certain: no half characters, nothing that may become a stop text.

        stop: asked after every token; True ends the answer with FinishReason.ABORT.
        """
        for piece in self._pieces(stop):
            if piece:
                self.text += piece
                yield piece

    def _pieces(self, stop: Callable[[], bool]) -> Iterator[str]:
        text = self.model.text_stream(self.request)
        with contextlib.closing(self._timed_tokens()) as tokens:
            for token in tokens:
                yield text.push(token)
                if text.stopped or stop():
                    self.finish_reason = FinishReason.STOP if text.stopped else FinishReason.ABORT
                    break
        if not text.stopped:
            yield text.finish()
        self.finish_reason = self.finish_reason or self.request.finish_reason
        if self.request.error is not None:
            raise self.request.error

    def _timed_tokens(self) -> Iterator[int]:
        """The engine's tokens; the first one's time is the prefill's, the others' are decode's."""
        begin = time.perf_counter()
        with contextlib.closing(self.model.engine.generate(self.request)) as tokens:
            for token in tokens:
                now = time.perf_counter()
                if self.tokens == 0:
                    self.prefill_seconds, begin = now - begin, now
                self.decode_seconds = now - begin if self.tokens else 0.0
                self.tokens += 1
                yield token
