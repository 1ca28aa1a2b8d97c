"""What all endpoints share: the engine thread, limits, and the way from a body to running requests."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from strata import __version__
from strata.config import Config
from strata.core import Request, SamplingParams
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.errors import ApiError, api_error, unavailable
from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.generation import Call, Choice
from strata.interfaces.server.metrics import ServerMetrics
from strata.interfaces.server.text import seeded
from strata.interfaces.server.worker import EngineThread, State

Result = TypeVar("Result")
FINGERPRINT = f"strata-{__version__}"
_TOKENIZING = 2  # texts at once; each takes one processor, and the engine wants them all
_RETRY_LOADING, _RETRY_MOST = 5, 60


@dataclass
class Service:
    """config: what was asked. draining: new requests are refused, running ones finish."""

    config: Config
    thread: EngineThread
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.thread)
        self.limiter = anyio.CapacityLimiter(_TOKENIZING)
        self.answer_seconds = 1.0  # of recent answers, on average: for Retry-After

    def admit(self) -> None:
        """Asked once per answer, at its beginning: ApiError (503) when no new ones are taken.

        What was admitted is answered to its end, also when draining begins a moment later.
        """
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down", _RETRY_LOADING)

    @property
    def model(self) -> LoadedModel:
        """Raises ApiError (503) while there is none, or none any more."""
        if self.thread.state is State.LOADING:
            raise unavailable(f"the model is loading: {self.thread.stage[0]}", "loading", _RETRY_LOADING)
        if self.thread.state is not State.READY or self.thread.model is None:
            raise unavailable("the engine has stopped", "engine_stopped", _RETRY_LOADING)
        return self.thread.model

    @property
    def name(self) -> str:
        """The model's name for clients."""
        given = self.config.server.model_name
        return given if given != "auto" else self.model.name

    @property
    def names(self) -> frozenset[str]:
        """All that clients may call the model: also its own name, and the last part of its path."""
        return frozenset((self.name, self.model.name, PurePath(self.config.model.path).name)) - {""}

    @functools.cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and tool calls. Only once there is a model."""
        return AnswerFormat(self.model.format.sources)

    @functools.cached_property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that a parser must see."""
        return self.answer_format.shown_ids(self.model.tokenizer)

    async def in_thread(self, param: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run what takes long (tokenizing, templates) beside the event loop. Raises ApiError."""
        try:
            return await anyio.to_thread.run_sync(
                functools.partial(function, *arguments), limiter=self.limiter, abandon_on_cancel=True
            )
        except Exception as error:
            raise api_error(error, param) from error

    def request(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        choice: int,
        bias: Mapping[int, float],
        logprobs: int | None,
    ) -> Request:
        """A request for one choice of an answer."""
        return Request(
            uuid.uuid4().hex,
            prompt,
            seeded(sampling, choice),
            self.model.stop_ids,
            logit_bias=bias,
            logprobs=logprobs,
        )

    def call(self, choices: Sequence[Choice], param: str) -> Call:
        """Start the requests. Raises ApiError when one can never run (400) or too many wait (429).

        param: the field that holds the prompt.
        """
        engine = self.model.engine
        for choice in choices:
            try:
                engine.check(choice.request)
            except Exception as error:
                raise api_error(error, param) from error
        waiting, room = self.thread.waiting, self.config.server.queue
        if waiting and waiting + len(choices) > room:
            raise ApiError(
                429,
                f"{waiting} requests wait, the queue holds {room}: try again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after=self._retry_after(waiting),
            )
        call = Call(self.thread, choices, self.metrics, float(self.config.server.answer_seconds))
        self.metrics.prompt_tokens.inc(call.prompt_tokens)
        call.start()
        return call

    def ended(self, call: Call) -> None:
        """Count an answer that is over."""
        self.metrics.answers.labels(call.outcome).inc()
        self.metrics.shared_tokens.inc(call.shared_tokens)
        if call.outcome == "ok" and call.timing.total is not None:
            self.answer_seconds += 0.1 * (call.timing.total - self.answer_seconds)

    def _retry_after(self, waiting: int) -> int:
        """Seconds until the queue has moved on, by the pace of recent answers."""
        turns = 1 + waiting / max(self.thread.running, 1)
        return max(1, min(round(turns * self.answer_seconds), _RETRY_MOST))


def head(service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """What an answer and all chunks of its stream share."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": FINGERPRINT,
    }


def usage(call: Call) -> dict[str, Any]:
    """Token counts of an answer."""
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "total_tokens": call.prompt_tokens + call.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": call.shared_tokens},
    }
