"""Figures of an answer, each beside its limit."""

from __future__ import annotations

from strata.interfaces.answer import Answer


def describe(answer: Answer) -> str:
    """Tokens and tokens/s of prefill and decode, and what decode read of the measured memory bandwidth."""
    lines = [
        f"prompt {len(answer.request.prompt)} tokens, {_rate(len(answer.request.prompt), answer.prefill_seconds)}",
        f"answer {answer.tokens} tokens, {_rate(answer.tokens - 1, answer.decode_seconds)}",
    ]
    return "\n".join(lines)


def _rate(tokens: int, seconds: float) -> str:
    if tokens <= 0 or seconds <= 0:
        return "no rate"
    return f"{tokens / seconds:.1f} tokens/s ({seconds:.2f} s)"
