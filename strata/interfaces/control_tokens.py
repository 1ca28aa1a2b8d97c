"""Control tokens typed by a user stay text.

A chat template mixes its own control tokens with what people wrote. Both end up in one string, in which a
typed `<|im_end|>` looks like the real one, so the conversation is *marked* before it is rendered: every
control token inside a user's string is wrapped into characters that never occur in text (Unicode
noncharacters; any that a user sends are removed). Wrapping, other than replacing the token, keeps templates
working that look for tokens in messages, such as those that cut `</think>` out of an answer. A token counts
as typed when marks stand on both sides: a mark on one side is what such a cut leaves behind. A string that
begins or ends with a part of a token gets a joint there, so that two strings cannot become one token.

Templates also trim, slice and compare, and a marker can get in the way of that. Therefore the text always
comes from rendering the untouched conversation, and the marked rendering only says where each control token
came from (`split_prompt`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

BEGIN, END, JOINT = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = BEGIN + END + JOINT
_MARKS = re.compile(f"[{MARKS}]+")
_NO_MARKS = str.maketrans("", "", MARKS)
_PAIR = 2  # marks on each side: one may be lost to a template that cuts off a character
_DELIMITERS = frozenset("<>[]{}|\uff5c")


def is_control(text: str, special: bool) -> bool:
    """Whether an added token steers the model: all special ones, and others that look like markup.

    `<think>` and `<tool_call>` are not marked special in tokenizer.json (they must show in answers), yet
    forging them cuts a reasoning block. Added words and runs of spaces are ordinary vocabulary.
    """
    return special or bool(_DELIMITERS.intersection(text))


@dataclass(frozen=True)
class Piece:
    """A stretch of a rendered prompt. plain: control tokens inside are a user's text, not control."""

    text: str
    plain: bool


class ControlTokens:
    """The texts of a tokenizer's control tokens, ready to be found."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        pattern = _trie_pattern(self._texts) if self._texts else "(?!)"
        self._find = re.compile(pattern)
        self._scan = re.compile(f"({BEGIN}+)?({pattern})({END}+)?|[{MARKS}]")
        self._heads = frozenset(t[:n] for t in self._texts for n in range(1, len(t)))
        self._tails = frozenset(t[n:] for t in self._texts for n in range(1, len(t)))
        self._longest = max(map(len, self._texts), default=0)

    def halves(self, text: str) -> list[str]:
        """The text cut inside every control token, so that no piece contains one."""
        cuts = [0, *((m.start() + m.end()) // 2 for m in self._find.finditer(text)), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(cuts)]

    def mark(self, value: Any) -> Any:
        """A copy of a JSON value in which every control token inside a string is wrapped."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        text = text.translate(_NO_MARKS)
        sizes = range(1, min(self._longest, len(text) + 1))
        head = JOINT if any(text[:n] in self._tails for n in sizes) else ""
        tail = JOINT if any(text[-n:] in self._heads for n in sizes) else ""
        return head + self._find.sub(f"{BEGIN * _PAIR}\\g<0>{END * _PAIR}", text) + tail

    def split_prompt(self, text: str, marked: str) -> tuple[str, list[Piece]]:
        """The prompt's text and its pieces, from the plain and the marked rendering.

        Usually both differ by the markers alone. Where a template tripped over a marker, the control tokens
        of both are compared: if they are the same in the same order, the plain text is kept with the origins
        of the marked one; if not, the marked text (without markers) is the safe choice.
        """
        runs, tokens = self._runs(marked)
        if _MARKS.sub("", marked) != text:
            found = self._find.findall(text)
            if found == [token for token, _ in tokens]:
                return text, _pieces(*self._transfer(text, [typed for _, typed in tokens]))
            text = _MARKS.sub("", marked)
        return text, _pieces(*_own_tokens(runs, tokens))

    def _runs(self, marked: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
        """Text between control tokens (has it a lone marker?), and the tokens (did a user type them?)."""
        runs, tokens, last, lone, text = [], [], 0, False, ""
        for match in self._scan.finditer(marked):
            text += marked[last : match.start()]
            last = match.end()
            if match[2] is None:
                lone = True
                continue
            runs.append((text, lone or bool(match[1])))
            tokens.append((match[2], bool(match[1] and match[3])))
            text, lone = "", bool(match[3])
        runs.append((text + marked[last:], lone))
        return runs, tokens

    def _transfer(self, text: str, typed: list[bool]) -> tuple[list[tuple[str, bool]], list[str]]:
        runs, _ = self._runs(text)
        found = self._find.findall(text)
        return _own_tokens(runs, list(zip(found, typed, strict=True)))


def _own_tokens(
    runs: list[tuple[str, bool]], tokens: list[tuple[str, bool]]
) -> tuple[list[tuple[str, bool]], list[str]]:
    """Typed tokens become part of the text around them; what remains separates runs at the template's own."""
    joined, own = [runs[0]], []
    for (token, typed), (text, lone) in zip(tokens, runs[1:], strict=True):
        if typed:
            joined[-1] = (joined[-1][0] + token + text, True)
        else:
            own.append(token)
            joined.append((text, lone))
    return joined, own


def _pieces(runs: list[tuple[str, bool]], own: list[str]) -> list[Piece]:
    """Runs with a user's control tokens are plain pieces of their own, all else is merged."""
    pieces: list[Piece] = []
    parsed = ""
    for index, (text, plain) in enumerate(runs):
        parsed += own[index - 1] if index else ""
        if not plain:
            parsed += text
            continue
        if parsed:
            pieces.append(Piece(parsed, plain=False))
        pieces.append(Piece(text, plain=True))
        parsed = ""
    if parsed:
        pieces.append(Piece(parsed, plain=False))
    return pieces


def _trie_pattern(texts: Iterable[str]) -> str:
    """A regular expression for the longest of many texts, linear in the input however many there are."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        if text:
            groups.setdefault(text[0], []).append(text[1:])
    branches = []
    for letter, rests in groups.items():
        rest = _trie_pattern(rests) if any(rests) else ""
        optional = "" in rests and rest
        branches.append(re.escape(letter) + (f"(?:{rest})?" if optional else rest))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
