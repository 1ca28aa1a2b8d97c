"""How long a context the KV memory allows, from the worst case: every request as long as it may be."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import CapacityError, ConfigError

AUTO_KV_SHARE = 0.5
"""Share of the free memory that the KV cache may take when neither its size nor the context is given."""


def auto_budget(available: int, weights: int) -> int:
    """Bytes for a KV cache of no given size: half of the free memory, less where weights need the room.

    It never goes below an eighth: without any context the fastest weights are of no use.
    """
    half = int(available * AUTO_KV_SHARE)
    return max(min(half, available - weights), available // 8)


@dataclass(frozen=True)
class KvSize:
    """How large the KV cache is: tokens per request and pages for all."""

    context: int
    pages: int


@dataclass(frozen=True)
class KvNeed:
    """What a model's KV cache is made of. longest: tokens of context that the model was made for."""

    name: str
    longest: int
    page_tokens: int
    page_bytes: int


def check_context(need: KvNeed, context: int | None) -> None:
    """Raises ConfigError for a context beyond the model's."""
    if context is not None and context > need.longest:
        raise ConfigError(
            f"a context of {context} tokens, but {need.name} was made for {need.longest}",
            remedy="lower model.context, or leave it at auto",
        )


def kv_size(need: KvNeed, context: int | None, budget: int, requests: int) -> KvSize:
    """Context and pages that fit `budget` bytes; context None: as much as the model was made for, or less.

    Raises ConfigError for a context beyond the model's, CapacityError when the memory is too small for the
    context asked for (or for one page per request).
    """
    check_context(need, context)
    affordable = budget // need.page_bytes // requests * need.page_tokens
    tokens = min(need.longest, affordable) if context is None else context
    if tokens > affordable or tokens < 2:
        pages = requests * -(-max(tokens, need.page_tokens) // need.page_tokens)
        fewer = "model.context" if requests == 1 else "model.context or engine.requests"
        raise CapacityError(
            f"the KV cache needs {pages * need.page_bytes} bytes for {requests} x {max(tokens, 2)} tokens, "
            f"{budget} are available",
            remedy=f"lower {fewer}, raise kv.size, or choose kv.dtype int8",
        )
    return KvSize(tokens, requests * -(-tokens // need.page_tokens))
