"""Reasoning that may take so many tokens: in every family it is ended as its template ends it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from grammar_answers import written
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_harness import CHAT, Harness
from tiny_checkpoint import marked_tokenizer

from strata.core import Constraint
from strata.interfaces.chat_template import ChatFormat
from strata.interfaces.grammar.compiler import GrammarCompiler
from strata.interfaces.grammar.source import Grammar
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.formats.answer_grammar import answer_source
from strata.interfaces.server.formats.choose import AnswerFormat
from strata.interfaces.server.reasoning_budget import reasoning_of, with_budget

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TEMPLATE = QWEN
FORGETS = "{# <think> </think> #}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
HARMONY = (
    "{# <|channel|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% endfor %}"
)


class Family:
    """A template with a tokenizer, which knows the markers as tokens or does not."""

    def __init__(self, template: str, *, as_tokens: bool) -> None:
        self.form = AnswerFormat(template)
        self.tokenizer = marked_tokenizer(self.form.markers if as_tokens else ())
        self.chat = ChatFormat(self.tokenizer, template)
        engine = SimpleNamespace(options=SimpleNamespace(valid_tokens=self.tokenizer.vocab_size))
        self.model = cast(LoadedModel, SimpleNamespace(tokenizer=self.tokenizer, engine=engine))

    def budget(
        self, most: int, prompt: str = "", other: Constraint | None = None, **given: Any
    ) -> Constraint:
        reasoning = reasoning_of(self.form, self.chat, prompt, **{"tools": False, **given})
        assert reasoning is not None
        return with_budget(self.model, reasoning, most, lambda: other)()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True)


@pytest.fixture(scope="module", params=["tokens", "text"])
def qwen(request: Any) -> Family:
    return Family(QWEN, as_tokens=request.param == "tokens")


def test_what_the_template_writes_behind_reasoning_ends_it(qwen: Family) -> None:
    reasoning = reasoning_of(qwen.form, qwen.chat, "<think>\n", tools=False)
    assert reasoning is not None and reasoning.begun and reasoning.ending == "\n</think>\n\n"
    form = AnswerFormat(FORGETS)
    forgets = reasoning_of(form, ChatFormat(qwen.tokenizer, FORGETS), "", tools=False)
    assert forgets is not None and not forgets.begun and forgets.ending == "</think>"
    assert reasoning_of(AnswerFormat("x"), qwen.chat, "", tools=False) is None


@example(seed=192, most=2, begun=True)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), most=st.integers(0, 12), begun=st.booleans())
def test_whatever_a_model_wants_it_stops_thinking(qwen: Family, seed: int, most: int, begun: bool) -> None:
    """All reasoning of an answer together; what the ending itself takes is not counted."""
    prompt = "<think>\n" if begun else ""
    following = qwen.budget(most, prompt)
    text = written(qwen.tokenizer, following, seed, ("<think>", "\u00e9"))
    parser = qwen.form.parser(prompt, None)
    thoughts = "".join(part.reasoning for part in [*parser.add(text), *parser.finish()])
    # A byte is a token, and so is a marker where the tokenizer knows it; a byte without its others is shown
    # as one character. At most three bytes are awaited.
    sections = text.count("<think>") + begun
    assert len(qwen.encode(thoughts.replace("\ufffd", "?"))) <= most + 3 + 2 * sections


def test_the_ending_is_written_token_by_token_and_whole(qwen: Family) -> None:
    following, ending = qwen.budget(3), qwen.encode("\n</think>\n\n")
    answer = qwen.encode("<think>abc")
    for place in range(len(ending)):
        (only,) = np.flatnonzero(following.allowed(answer + ending[:place]))
        assert only == ending[place]
    assert following.allowed(answer + ending).all()
    assert following.legal(answer, [*ending, 5]) == len(ending) + 1
    assert following.legal(answer, [ending[0], 5]) == 1
    assert following.legal(answer[:-1], qwen.encode("cd")) == 1
    again = answer + ending + qwen.encode("so <think>")
    assert np.flatnonzero(following.allowed(again)).tolist() == [ending[0]]


def test_no_character_is_cut_in_half(qwen: Family) -> None:
    following, euro = qwen.budget(2), qwen.encode("\u20ac")
    answer = qwen.encode("<think>a")
    assert len(euro) == 3
    for place in (1, 2):
        assert following.allowed(answer + euro[:place]).all()
    assert np.count_nonzero(following.allowed(answer + euro)) == 1


@settings(max_examples=40, deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "\u00e9"]), max_size=12),
    places=st.lists(st.integers(0, 60), min_size=1, max_size=8),
)
def test_positions_may_be_asked_in_any_order(qwen: Family, text: list[str], places: list[int]) -> None:
    answer, used = qwen.encode("".join(text)), qwen.budget(2)
    for place in places:
        before = answer[: place % (len(answer) + 1)]
        used.legal(before, [7, 8, 9])
        fresh = qwen.budget(2)
        assert np.array_equal(used.allowed(before), fresh.allowed(before))
        assert used.legal(before, answer[len(before) :]) == fresh.legal(before, answer[len(before) :])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_beside_a_grammar(qwen: Family, seed: int) -> None:
    compiler = GrammarCompiler(qwen.tokenizer)
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}
    source = answer_source(qwen.form, compiler.rules(), "<think>\n", Grammar(schema=schema), None)
    following = qwen.budget(4, "<think>\n", compiler.compile(source))
    parser = qwen.form.parser("<think>\n", None)
    text = written(qwen.tokenizer, following, seed, ("x",))
    content = "".join(part.text for part in [*parser.add(text), *parser.finish()])
    jsonschema.validate(json.loads(content), schema)


@pytest.mark.parametrize("tools", [False, True])
def test_gpt_oss(tools: bool) -> None:
    """Without tools what follows is the answer; with them the model says which."""
    family = Family(HARMONY, as_tokens=True)
    following, answer = family.budget(2, tools=tools), family.encode("<|channel|>analysis<|message|>ab")
    ending = "<|end|><|start|>assistant" + ("" if tools else "<|channel|>final<|message|>")
    ids = family.encode(ending)
    for place in range(len(ids)):
        assert np.flatnonzero(following.allowed(answer + ids[:place])).tolist() == [ids[place]]
    assert following.allowed(answer + ids).all()


def test_over_http(server: Harness) -> None:
    """The model knows no reasoning, so it would not end it by itself."""
    assert server.thread.model is not None
    encode = server.thread.model.tokenizer.encode
    body = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "max_tokens": 60}
    thinking = {**body, "chat_template_kwargs": {"enable_thinking": True}}
    free = server.post(CHAT, {**thinking, "max_tokens": 8, "ignore_eos": True}).json["choices"][0]["message"]
    assert not free["content"] and free["reasoning_content"]
    for most in (0, 3):
        reply = server.post(CHAT, {**thinking, "thinking_token_budget": most})
        message = reply.json["choices"][0]["message"]
        assert len(encode(message.get("reasoning_content", ""))) <= most and message["content"]
    asked = {**body, "thinking": {"type": "enabled", "budget_tokens": 3}}
    blocks = server.post("/v1/messages", asked).json["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert len(encode(blocks[0]["thinking"])) <= 3
    for wrong in (-1, 1.5, "3", True):
        assert server.post(CHAT, {**body, "thinking_token_budget": wrong}).status == 400
        thinking = {"type": "enabled", "budget_tokens": wrong}
        assert server.post("/v1/messages", {**body, "thinking": thinking}).status == 400
