"""Reasoning that may take so many tokens and is then ended as the model's own template ends it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.core import Constraint
from strata.errors import TemplateError
from strata.interfaces.chat_template import ChatFormat
from strata.interfaces.grammar.compiler import common_length
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.formats.harmony import ANALYSIS, ANALYSIS_END, HANDED_OVER, TO_THE_FINAL

_THOUGHT, _ANSWER = "probe_thought", "probe_answer"
_LONGEST_ENDING = 64
"""Characters. What a template writes between thought and answer is a marker and line breaks."""


class Reasoning(NamedTuple):
    """Markers around reasoning. begun: the prompt has begun it. ending: the text that ends it early."""

    begin: str
    end: str
    begun: bool
    ending: str


def reasoning_of(form: AnswerFormat, chat: ChatFormat, prompt: str, *, tools: bool) -> Reasoning | None:
    """Of an answer to that prompt; None: the model does not reason. Renders a small conversation."""
    if form.harmony:
        # With tools the model itself must say whether it answers or calls.
        ending = HANDED_OVER if tools else TO_THE_FINAL
        return Reasoning(ANALYSIS, ANALYSIS_END, prompt.endswith(ANALYSIS), ending)
    thinking = form.thinking(prompt)
    if thinking is None:
        return None
    return Reasoning(thinking.begin, thinking.end, thinking.open_at_start, _ending(chat, thinking.end))


def _ending(chat: ChatFormat, marker: str) -> str:
    """What the template writes between reasoning and content; the marker where it leaves reasoning out."""
    said = {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}
    try:
        text = chat.render([{"role": "user", "content": "probe"}, said], add_generation_prompt=False)
    except TemplateError:
        return marker
    between = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
    return between if marker in between and len(between) <= _LONGEST_ENDING else marker


def with_budget(
    model: LoadedModel, reasoning: Reasoning, most: int, others: Callable[[], Constraint | None]
) -> Callable[[], Constraint]:
    """Makes a constraint for each choice. others: makes what else its answer follows."""
    tokenizer = model.tokenizer
    ids = max(tokenizer.vocab_size, model.engine.options.valid_tokens)
    ending = tokenizer.encode(reasoning.ending, special=True)
    return lambda: ReasoningBudget(reasoning, tokenizer.token_bytes, ending, most, ids, others())


class _State(NamedTuple):
    """inside: in reasoning, of which `spent` tokens were written. ended: tokens of the ending that were.

    tail: bytes that may be the beginning of a marker.
    """

    inside: bool
    spent: int
    ended: int
    tail: bytes


class ReasoningBudget:
    """`core.Constraint`: when reasoning has had its tokens, what ends it is all that may follow.

    token_bytes: the bytes of an id. ending: ids of the text that ends reasoning. most: tokens of all
    reasoning of an answer. ids: how many there are. other: what else the answer follows, with the last word.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        token_bytes: Callable[[int], bytes],
        ending: Sequence[int],
        most: int,
        ids: int,
        other: Constraint | None,
    ) -> None:
        self._begin, self._end = reasoning.begin.encode(), reasoning.end.encode()
        self._bytes = token_bytes
        self._ending = ending
        self._most = most
        self._any = np.ones(ids, dtype=np.bool_)
        self._other = other
        self._seen: list[int] = []
        self._states = [_State(reasoning.begun, 0, 0, b"")]  # one more than `_seen` has tokens

    def allowed(self, answer: list[int]) -> NDArray[np.bool_]:
        """See `core.Constraint`."""
        mask = self._any if self._other is None else self._other.allowed(answer)
        token = self._due(self._at(answer))
        if token is None or not mask[token]:
            return mask
        only = np.zeros_like(mask)
        only[token] = True
        return only

    def legal(self, answer: list[int], draft: list[int]) -> int:
        """See `core.Constraint`."""
        count = len(draft) if self._other is None else self._other.legal(answer, draft)
        for place in range(count):
            due = self._due(self._at(answer + draft[:place]))
            if due is not None and draft[place] != due:
                return place
        return count

    def _at(self, answer: list[int]) -> _State:
        """The state behind these tokens; what was seen and is not among them is forgotten."""
        same = common_length(self._seen, answer)
        del self._seen[same:], self._states[same + 1 :]
        for token in answer[same:]:
            self._states.append(self._behind(self._states[-1], token))
        self._seen += answer[same:]
        return self._states[-1]

    def _due(self, state: _State) -> int | None:
        """The token that must follow, once the budget is spent and no character is half written."""
        over = state.inside and state.spent >= self._most and _is_whole(state.tail)
        return self._ending[state.ended] if state.ended or over else None

    def _behind(self, state: _State, token: int) -> _State:
        ended = 0 if self._due(state) is None else (state.ended + 1) % len(self._ending)
        inside, tail = state.inside, state.tail + self._bytes(token)
        while (place := tail.find(marker := self._end if inside else self._begin)) >= 0:
            inside, tail = not inside, tail[place + len(marker) :]
        kept = max(len(self._begin), len(self._end)) - 1
        return _State(inside, state.spent + state.inside, ended, tail[-kept:])


def _is_whole(data: bytes) -> bool:
    """Whether UTF-8 does not end in the middle of a character."""
    return codecs.utf_8_decode(data, "replace", False)[1] == len(data)
