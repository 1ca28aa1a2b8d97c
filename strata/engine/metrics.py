"""What the engine has done and how fast: per request, and in total.

Bytes are computed from the formats, not measured: what a step has to read of weights and KV at least.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.backends.base import KvSpec
from strata.engine.scheduler import Work
from strata.model.decoder import Decoder

KEPT_REQUESTS = 1024
"""Requests whose figures are kept; a server must not grow with every request it has seen."""


@dataclass
class Phase:
    """Tokens computed in one phase (prefill or decode), the seconds they took and the bytes they read.

    Seconds and bytes of a step are shared among its tokens, each counting the same.
    """

    tokens: int = 0
    seconds: float = 0.0
    bytes: float = 0.0

    def add(self, tokens: int, seconds: float, read: float) -> None:
        """Count tokens with their share of a step."""
        self.tokens += tokens
        self.seconds += seconds
        self.bytes += read

    @property
    def tokens_per_second(self) -> float:
        """0.0 before anything was computed."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """0.0 before anything was computed."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class Progress:
    """Prompt tokens computed (prefill) and answer tokens computed (decode)."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)


@dataclass(frozen=True)
class StepBytes:
    """Bytes one step reads: weights that every token shares, the experts it touches, keys and values."""

    shared: int
    experts: int
    kv: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.shared + self.experts + self.kv


@dataclass
class Metrics:
    """Totals since the engine started, and the figures of the last KEPT_REQUESTS requests."""

    steps: int = 0
    total: Progress = field(default_factory=Progress)
    requests: OrderedDict[str, Progress] = field(default_factory=OrderedDict)
    expert_uses: Counter[int] = field(default_factory=Counter)  # by layer: experts that steps touched

    def start(self, request_id: str) -> None:
        """Begin a request's figures; the oldest request's are forgotten when there are too many."""
        self.requests[request_id] = Progress()
        self.requests.move_to_end(request_id)
        if len(self.requests) > KEPT_REQUESTS:
            self.requests.popitem(last=False)

    def add_step(self, works: Sequence[Work], kept: Sequence[int], read: StepBytes, seconds: float) -> None:
        """Count one step of `seconds` wall time. kept: rows of each work that were no rejected draft."""
        self.steps += 1
        rows = sum(work.count for work in works)
        for work, tokens in zip(works, kept, strict=True):
            share = work.count / rows
            for progress in (self.total, self.requests.get(work.request.request_id)):
                if progress is not None:
                    phase = progress.prefill if work.is_prefill else progress.decode
                    phase.add(tokens, share * seconds, share * read.total)


def step_bytes(decoder: Decoder, kv: KvSpec, works: Sequence[Work]) -> StepBytes:
    """Bytes of the decoder's latest forward pass, which computed `works`."""
    experts = sum(used * decoder.expert_bytes[layer] for layer, used in decoder.routes.used.items())
    tokens = sum(
        layers * _visible(work, window) for work in works for window, layers in decoder.windows.items()
    )
    return StepBytes(decoder.shared_bytes, experts, tokens * kv.layer_bytes // kv.page_tokens)


def _visible(work: Work, window: int) -> int:
    """Tokens of one layer's KV that the work's rows see between them."""
    stop = work.start + work.count
    return min(stop, window + work.count - 1) if window else stop
