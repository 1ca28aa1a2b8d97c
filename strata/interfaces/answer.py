"""One answer: the engine's token ids become text, and stop texts end it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from strata.core import FinishReason, Request, SamplingParams
from strata.errors import ContextOverflowError

if TYPE_CHECKING:
    from strata.engine.metrics import Progress
    from strata.interfaces.models import LoadedModel
    from strata.interfaces.server.output import OutputParser


class Answer:
    """Iterate `pieces` once; text, token count and finish_reason are final afterwards.

    continuation: the text goes on after a raw prompt, so that a leading space belongs to it.
    Raises ContextOverflowError at once when the prompt leaves no room for a token.
    """

    def __init__(
        self,
        model: LoadedModel,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        continuation: bool = False,
    ) -> None:
        if len(prompt) >= model.context:
            raise ContextOverflowError(len(prompt), model.context)
        self.model = model
        self.continuation = continuation
        self.request = Request(request_id, prompt, sampling, model.stop_ids)
        self.text = ""
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self._parser: OutputParser | None = None
        self._shown: frozenset[int] = frozenset()

    def read_with(self, parser: OutputParser, shown: frozenset[int]) -> None:
        """Give out only what the parser takes for content. shown: special tokens that it must see."""
        self._parser, self._shown = parser, shown

    @property
    def sampling(self) -> SamplingParams:
        """What the request asked for."""
        return self.request.sampling

    @property
    def context_full(self) -> bool:
        """Whether generation ended because the context has no room left."""
        full = len(self.request.tokens) >= self.model.context
        return self.finish_reason is FinishReason.LENGTH and full

    @property
    def progress(self) -> Progress | None:
        """The engine's figures: tokens, seconds and bytes of prefill and decode."""
        return self.model.engine.metrics.requests.get(self.request.request_id)

    def pieces(self, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Text as it becomes certain: no half characters, nothing that may become a stop text.

        stop: asked before every step of the engine; True ends the answer with FinishReason.ABORT.
        Raises the request's error, e.g. NumericalError, CapacityError.
        """
        for piece in self._content(stop):
            if piece:
                self.text += piece
                yield piece

    def _content(self, stop: Callable[[], bool]) -> Iterator[str]:
        if self._parser is None:
            yield from self._pieces(stop)
            return
        for piece in self._pieces(stop):
            yield "".join(part.text for part in self._parser.add(piece))
        yield "".join(part.text for part in self._parser.finish())

    def _pieces(self, stop: Callable[[], bool]) -> Iterator[str]:
        text = self.model.text_stream(self.request, continuation=self.continuation, shown=self._shown)
        with contextlib.closing(self.model.engine.generate(self.request, stop)) as tokens:
            for token in tokens:
                self.tokens += 1
                yield text.add(token)
                if text.stopped:
                    self.finish_reason = FinishReason.STOP
                    break
        yield text.flush()
        self.finish_reason = self.finish_reason or self.request.finish_reason
