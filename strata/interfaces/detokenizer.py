"""Text that grows token by token: whole characters only, and nothing past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strata.errors import RequestError

if TYPE_CHECKING:
    from strata.interfaces.tokenizer import Tokenizer


class Detokenizer:
    """Turns generated ids into text; the pieces add up to `Tokenizer.decode` of all of them.

    A token may end inside a UTF-8 character: at most three bytes are held back until the rest comes. The cost
    of a token does not depend on how many came before it.
    continuation: the text goes on after a raw prompt, so a leading space belongs to it. shown: special tokens
    that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - shown if skip_special else frozenset()
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not continuation

    def add(self, token_id: int) -> str:
        """The characters that this token completes; often the whole token, sometimes nothing."""
        if token_id in self._skip:
            return ""
        return self._emit(self._characters.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole."""
        return self._emit(self._characters.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return self._tokenizer.strip_start(text)
        return text


class StopMatcher:
    """Cuts a growing text before the first stop string, however the text arrives in pieces.

    Text that may be the beginning of a stop string is held back and released once it cannot become one. The
    stop that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty", remedy="leave it out, or give one character or more")
        self._stops = tuple(_StopState(stop) for stop in stops)
        self._held = ""
        self.stopped = False
        self.found: str | None = None  # the stop string that came

    def add(self, text: str) -> str:
        """The text that may be shown now. After `stopped` is set nothing more is shown."""
        if self.stopped:
            return ""
        for position, letter in enumerate(text):
            found = [stop.length for stop in self._stops if stop.step(letter)]
            if found:
                self.stopped = True
                shown = self._held + text[: position + 1]
                self._held = ""
                self.found = shown[len(shown) - max(found) :]
                return shown[: len(shown) - max(found)]
        pending = self._held + text
        keep = max((stop.matched for stop in self._stops), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held


class _StopState:
    """How many characters of one stop string the text ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.matched = 0
        self._shorter = [0] * len(stop)  # longest proper border of each prefix
        border = 0
        for index in range(1, len(stop)):
            while border and stop[index] != stop[border]:
                border = self._shorter[border - 1]
            border += stop[index] == stop[border]
            self._shorter[index] = border

    def step(self, letter: str) -> bool:
        """Take one character; True when the stop string is complete."""
        while self.matched and self._stop[self.matched] != letter:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self._stop[self.matched] == letter
        return self.matched == self.length
