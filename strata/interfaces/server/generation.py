"""One HTTP request's answers: jobs in the engine thread, pieces of text in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from strata.core import FinishReason, Request, TokenLogprob
from strata.interfaces.models import TextStream
from strata.interfaces.server.errors import ApiError, api_error
from strata.interfaces.server.metrics import ServerMetrics
from strata.interfaces.server.output import OutputParser, Part
from strata.interfaces.server.worker import EngineThread, Job, Progress

TokenLogprobs = tuple[int, TokenLogprob]


@dataclass(frozen=True)
class Piece:
    """News of one choice. logprobs: of the tokens since the choice's last piece. finish: its last piece."""

    index: int
    parts: tuple[Part, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None


IDLE = Piece(-1)
"""Nothing came for IDLE_SECONDS: a stream tells its client that the connection is alive."""
IDLE_SECONDS = 15.0


class Choice:
    """One answer: its request, and what its text is read with."""

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream,
        parser: OutputParser,
        most_calls: int | None = None,
    ) -> None:
        """most_calls: the answer ends before the tool call after so many."""
        self.most_calls = most_calls
        self.index = index
        self.request = request
        self.tokens = 0
        self.finish: str | None = None
        self._text = text
        self._parser = parser
        self._called = False
        self._enough = False

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer, if one did."""
        return self._text.stop_text

    def take(self, progress: Progress) -> Piece | None:
        """What a step brought; None when nothing is certain yet. Raises ApiError when the request failed."""
        if self.finish is not None:
            return None  # the engine was a token further when the stop text was found
        if progress.error is not None:
            raise api_error(progress.error)
        text = ""
        logprobs: tuple[TokenLogprobs, ...] = ()
        if progress.token is not None:
            self.tokens += 1
            text = self._text.add(progress.token)
            if progress.logprob is not None:
                logprobs = ((progress.token, progress.logprob),)
        parts = self._read(text, ended=self._text.stopped or progress.finish is not None)
        if self._text.stopped or self._enough or progress.finish is not None:
            self.finish = self._reason(progress.finish)
        return Piece(self.index, parts, logprobs, self.finish) if parts or logprobs or self.finish else None

    def _read(self, text: str, *, ended: bool) -> tuple[Part, ...]:
        parts = self._parser.add(text + self._text.flush() if ended else text)
        parts += self._parser.finish() if ended else []
        if self.most_calls is not None:
            allowed = [part for part in parts if part.call is None or part.call.call < self.most_calls]
            self._enough = len(allowed) < len(parts)
            parts = allowed
        self._called = self._called or any(part.call is not None for part in parts)
        return tuple(parts)

    def _reason(self, finish: FinishReason | None) -> str:
        """OpenAI's word."""
        if self._text.stopped or self._enough or finish is FinishReason.STOP:
            return "tool_calls" if self._called else "stop"
        if finish is FinishReason.ABORT:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
        return "length"


@dataclass
class Timing:
    """Seconds since the request came: of the first token and of the end."""

    begin: float = field(default_factory=time.perf_counter)
    first: float | None = None
    latest: float | None = None
    total: float | None = None


class Call:
    """The choices of one HTTP request. Iterate `pieces` once, and close it: that frees what still runs."""

    def __init__(
        self, thread: EngineThread, choices: Sequence[Choice], metrics: ServerMetrics, seconds: float
    ) -> None:
        """choices: those of one prompt share the list of its ids. seconds: the most the answer may take."""
        self.choices = choices
        self.timing = Timing()
        self.outcome = "aborted"  # unless it ends in another way
        self._thread = thread
        self._metrics = metrics
        self._seconds = seconds
        self._news: deque[tuple[Choice, Progress]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._jobs: list[Job] = []

    @property
    def prompt_tokens(self) -> int:
        """Every prompt counted once."""
        return sum(len(choice.request.prompt) for choice in self._leaders())

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not computed because an earlier request had computed them."""
        return sum(choice.request.shared for choice in self._leaders())

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.tokens for choice in self.choices)

    def start(self) -> None:
        """Hand the requests to the engine. Everything that can be wrong with them was checked before."""
        leaders = [(choice, self._job(choice)) for choice in self._leaders()]
        for choice, job in leaders:
            same = [other for other in self.choices if other.request.prompt is choice.request.prompt]
            job.followers = [self._job(other) for other in same if other is not choice]
            self._thread.submit(job)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """News of all choices as they come. Raises ApiError when one of them fails, or time is up."""
        try:
            while any(choice.finish is None for choice in self.choices):
                self._check_time()
                if not self._news:
                    await self._wait()
                if not self._news:
                    yield IDLE
                    continue
                choice, progress = self._news.popleft()
                if choice.finish is None:
                    self._measure(progress)
                piece = choice.take(progress)
                if piece is not None:
                    self._cancel_if_stopped(choice, progress)
                    yield piece
            self.outcome = "ok"
        except ApiError as error:
            self.outcome = error.body.error.code or "error"
            raise
        finally:
            self.close()

    async def _wait(self) -> None:
        """Until there are news, for IDLE_SECONDS or the rest of the time at most.

        One future and one timer: asyncio.wait_for around a queue costs a task per token.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(max(min(IDLE_SECONDS, self._left), 0.0), _resolve, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    @property
    def _left(self) -> float:
        return self._seconds - (time.perf_counter() - self.timing.begin)

    def _check_time(self) -> None:
        if self._left <= 0:
            message = f"the answer took longer than {self._seconds:g} s"
            raise ApiError(504, message, kind="server_error", code="timeout")

    def close(self) -> None:
        """Abort what still runs."""
        self.timing.total = time.perf_counter() - self.timing.begin
        left = [job for job in self._jobs if job.request.request_id in self._thread.open]
        if left:
            self._thread.cancel(left)

    def _leaders(self) -> list[Choice]:
        """The first choice of each prompt."""
        seen: dict[int, Choice] = {}
        for choice in self.choices:
            seen.setdefault(id(choice.request.prompt), choice)
        return list(seen.values())

    def _job(self, choice: Choice) -> Job:
        job = Job(choice.request, lambda progress: self._hear(choice, progress))
        self._jobs.append(job)
        return job

    def _hear(self, choice: Choice, progress: Progress) -> None:
        self._news.append((choice, progress))
        if self._waiter is not None:
            _resolve(self._waiter)

    def _cancel_if_stopped(self, choice: Choice, progress: Progress) -> None:
        """A stop text ends the choice here, the engine does not know yet."""
        if choice.finish is not None and progress.finish is None:
            self._thread.cancel([job for job in self._jobs if job.request is choice.request])

    def _measure(self, progress: Progress) -> None:
        if progress.token is None:
            return
        now = time.perf_counter()
        if self.timing.first is None:
            self.timing.first = now - self.timing.begin
            self._metrics.first_token.observe(self.timing.first)
        elif len(self.choices) == 1 and self.timing.latest is not None:
            self._metrics.between_tokens.observe(now - self.timing.latest)
        self.timing.latest = now
        self._metrics.completion_tokens.inc()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
