"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from strata.core import TokenLogprob
from strata.interfaces.tokenizer import Tokenizer

TokenLogprobs = tuple[int, TokenLogprob]
_LOWEST = -9999.0  # JSON knows no infinity; OpenAI writes this number


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`."""
    return [
        {
            **_entry(tokenizer, token, logprob.value),
            "top_logprobs": [_entry(tokenizer, other, value) for other, value in logprob.top],
        }
        for token, logprob in logprobs
    ]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; U+FFFD for bytes that are a part of a character."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(value), "bytes": list(data)}


def finite(value: float) -> float:
    """For JSON."""
    return max(_LOWEST, value)  # in this order NaN is the lowest, too


class TextLogprobs:
    """The lists of a completion's logprobs, as they grow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, logprobs: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The lists for the next tokens; None: nothing is known of the token's probability."""
        lists: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for token, logprob in logprobs:
            text = token_text(self._tokenizer, token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if logprob is None else finite(logprob.value))
            lists["top_logprobs"].append(None if logprob is None else self._top(token, logprob))
            lists["text_offset"].append(self._offset)
            self._offset += len(text)
        return lists

    def _top(self, token: int, logprob: TokenLogprob) -> dict[str, float]:
        """Best first; of tokens with the same text the best counts. The token itself is always among them."""
        top: dict[str, float] = {}
        for other, value in (*logprob.top, (token, logprob.value)):
            top.setdefault(token_text(self._tokenizer, other), finite(value))
        return top
