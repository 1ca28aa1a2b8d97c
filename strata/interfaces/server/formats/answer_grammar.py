"""The grammar of a whole answer: reasoning as the family writes it, then content or calls.

Or, where only calls must have a form, an answer that is free until a call begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.interfaces.grammar.source import Grammar, Rules, one_of, quoted
from strata.interfaces.server.formats.call_grammar import bare_terms, harmony_terms
from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.formats.tagged import Thinking

_MOST_CALLS = 16
"""In one answer: a weak model that must call would go on for ever."""
_SPACE = r"/[ \n]{0,4}/"
_ANYTHING = Grammar(lark="start: /(?s:.*)/")


@dataclass(frozen=True)
class Calls:
    """The functions that may be called; several: more than one time."""

    functions: Sequence[Mapping[str, Any]]
    several: bool


def answer_source(
    form: AnswerFormat, rules: Rules, prompt: str, content: Grammar | None, calls: Calls | None
) -> str:
    """For `GrammarCompiler.compile`: an answer is content, or calls; at least one of them is given.

    prompt: its text. Reasoning is free. Raises RequestError for a grammar that is too long.
    """
    assert content is not None or calls is not None
    if form.harmony:
        return rules.source(_harmony(rules, content, calls))
    wanted = [] if content is None else [rules.grammar(content)]
    wanted += [] if calls is None else [_calls(form, rules, calls)]
    return rules.source(f"{_reasoning(rules, form.thinking(prompt), prompt)} {one_of(wanted)}")


def free_source(form: AnswerFormat, rules: Rules, prompt: str, calls: Calls) -> str:
    """For `GrammarCompiler.compile`: any answer, whose calls are some of these and whole.

    It follows the reader: inside reasoning nothing is a call. form: one whose calls are known.
    """
    if form.calls is None:
        return rules.source(_harmony(rules, _ANYTHING, calls, ("analysis", "commentary")))
    thinking, markers = form.thinking(prompt), form.calls.markers
    begins = [markers.begin] + ([thinking.begin] if thinking else [])
    free = rules.free(begins)
    sections = [f"{rules.after(free, markers.begin)} {_call(form, rules, calls)}"]
    sections += [f"{free} {rules.marker(text)}" for text in markers.ignored if rules.is_token(text)]
    if thinking:
        sections.append(f"{rules.after(free, thinking.begin)} {rules.until(thinking.end)}")
    begun = rules.until(thinking.end) if thinking and thinking.open_at_start else ""
    return rules.source(f"{begun} {one_of(sections)}* {free}")


def _reasoning(rules: Rules, thinking: Thinking | None, prompt: str) -> str:
    """Nothing where the prompt has ended the reasoning already, as templates do that switch it off."""
    if thinking is None or prompt.rstrip().endswith(thinking.end):
        return ""
    rest = f"{rules.until(thinking.end)} {_SPACE}"
    return rest if thinking.open_at_start else f"({rules.marker(thinking.begin)} {rest})?"


def _calls(form: AnswerFormat, rules: Rules, calls: Calls) -> str:
    if form.calls is None:
        return one_of(bare_terms(rules, function) for function in calls.functions)
    markers = form.calls.markers
    call = f"{rules.marker(markers.begin)} {_call(form, rules, calls)}"
    more = f"({quoted(chr(10))}? {call}){{0,{_MOST_CALLS - 1}}}" if calls.several else ""
    around = [rules.marker(text) for text in markers.ignored]
    return f"({' '.join([*around[:1], call, more, *around[1:]])})"


def _call(form: AnswerFormat, rules: Rules, calls: Calls) -> str:
    """Behind the marker that begins a call, up to the one that ends it."""
    assert form.calls is not None
    terms = one_of(form.calls.terms(rules, function, form.source) for function in calls.functions)
    return f"{terms} {rules.marker(form.calls.markers.end)}"


def _harmony(
    rules: Rules, content: Grammar | None, calls: Calls | None, before: Sequence[str] = ("analysis",)
) -> str:
    """The prompt ends before the channel. One call an answer: the marker behind it is a stop token.

    before: channels of messages that may come first.
    """
    channel, message, start = (rules.marker(text) for text in ("<|channel|>", "<|message|>", "<|start|>"))
    names = one_of(quoted(name) for name in before)
    analysis = f"{channel} {names} {message} {rules.until('<|end|>')} {start}"
    wanted = [] if content is None else [f"{channel} {quoted('final')} {message} {rules.grammar(content)}"]
    wanted += [] if calls is None else [harmony_terms(rules, function) for function in calls.functions]
    return f"({analysis} {quoted('assistant')})* {one_of(wanted)}"
