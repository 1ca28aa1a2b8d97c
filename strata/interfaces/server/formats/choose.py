"""Which format a model writes: its chat template says, for it shows the model its own calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.interfaces.server.formats.bare_call import BareCall
from strata.interfaces.server.formats.call_grammar import (
    CODER_TERMS,
    GLM_TERMS,
    MINIMAX_TERMS,
    CallTerms,
    deepseek_terms,
    hermes_terms,
    kimi_terms,
)
from strata.interfaces.server.formats.call_reader import CallReader
from strata.interfaces.server.formats.harmony import MARKERS as HARMONY_MARKERS
from strata.interfaces.server.formats.harmony import HarmonyOutput
from strata.interfaces.server.formats.json_call import JsonCall
from strata.interfaces.server.formats.keyed_call import CODER, GLM, MINIMAX, KeyedCall
from strata.interfaces.server.formats.named_call import DEEPSEEK_SEPARATOR, KIMI_SEPARATOR, NamedCall
from strata.interfaces.server.formats.tagged import CallMarkers, TaggedOutput, Thinking
from strata.interfaces.server.output import OutputParser, PlainOutput
from strata.interfaces.tokenizer import Tokenizer

_TAGS = CallMarkers("<tool_call>", "</tool_call>")
_MINIMAX = CallMarkers("<minimax:tool_call>", "</minimax:tool_call>")
_DEEPSEEK = CallMarkers(
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
)
_KIMI = CallMarkers(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_HARMONY = "<|channel|>"
_THINK = Thinking()


@dataclass(frozen=True)
class CallFormat:
    """hint: what a template of the family contains. reader: of one call, given the tools by name.

    terms: of one call, for a grammar.
    """

    name: str
    hint: str
    markers: CallMarkers
    reader: Callable[[Mapping[str, Any]], CallReader]
    terms: CallTerms


# The first whose hint is in the template; several families share <tool_call>, Hermes is what remains.
FORMATS = (
    CallFormat(
        "minimax", "<minimax:tool_call>", _MINIMAX, lambda tools: KeyedCall(MINIMAX, tools), MINIMAX_TERMS
    ),
    CallFormat("glm", "<arg_key>", _TAGS, lambda tools: KeyedCall(GLM, tools), GLM_TERMS),
    CallFormat("coder", "<function=", _TAGS, lambda tools: KeyedCall(CODER, tools), CODER_TERMS),
    CallFormat(
        "deepseek", DEEPSEEK_SEPARATOR, _DEEPSEEK, lambda tools: NamedCall(DEEPSEEK_SEPARATOR), deepseek_terms
    ),
    CallFormat("kimi", KIMI_SEPARATOR, _KIMI, lambda tools: NamedCall(KIMI_SEPARATOR), kimi_terms),
    CallFormat("hermes", "<tool_call>", _TAGS, lambda tools: JsonCall(), hermes_terms),
)


class AnswerFormat:
    """What a template tells about answers. source: the template's text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.harmony = _HARMONY in source
        self.calls = next((form for form in FORMATS if form.hint in source), None)
        self.thinks = _THINK.end in source and not self.harmony

    @property
    def name(self) -> str | None:
        """Of the format of tool calls; None: nothing here reads this model's."""
        return "harmony" if self.harmony else self.calls.name if self.calls else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must stay in the answer for the parser, although they may be special tokens."""
        found: tuple[str, ...] = HARMONY_MARKERS if self.harmony else ()
        if self.thinks:
            found += (_THINK.begin, _THINK.end)
        if self.calls is not None:
            markers = self.calls.markers
            found += (markers.begin, markers.end, *markers.ignored)
            found += (DEEPSEEK_SEPARATOR, KIMI_SEPARATOR)
        return found

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that a parser must see."""
        ids = (tokenizer.token_id(marker) for marker in self.markers)
        return frozenset(index for index in ids if index is not None)

    def thinking(self, prompt: str) -> Thinking | None:
        """Where reasoning may stand in the answer to a prompt, which may have begun it already."""
        if not self.thinks:
            return None
        opened = prompt.rfind(_THINK.begin) > prompt.rfind(_THINK.end) and prompt.rstrip().endswith(
            _THINK.begin
        )
        return Thinking(open_at_start=opened)

    def parser(
        self, prompt: str, tools: Sequence[Mapping[str, Any]] | None, *, must_call: bool = False
    ) -> OutputParser:
        """For one answer. prompt: its text, which may end inside the reasoning.

        tools: those that may be called; without any nothing is taken for a call. must_call: the answer is
        a call for certain, so that it can be read even where the model has no format that is known.
        """
        if self.harmony:
            return HarmonyOutput()
        thinking = self.thinking(prompt)
        calls = self.calls if tools else None
        if must_call and calls is None:
            return BareCall(TaggedOutput(thinking, None, JsonCall))
        if calls is None and thinking is None:
            return PlainOutput()
        named = {tool["function"]["name"]: tool["function"] for tool in tools or []}
        make = calls.reader if calls is not None else lambda _: JsonCall()
        return TaggedOutput(thinking, calls.markers if calls else None, lambda: make(named))
