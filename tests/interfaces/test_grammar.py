"""Grammars of answers: what a tokenizer's tokens may be at every position, forwards and back."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_answers import written
from hangs import SECONDS, soon
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import RequestError, UsageError
from strata.interfaces.bundled import model_path
from strata.interfaces.grammar.compiler import (
    MAX_GBNF,
    MAX_WRITTEN,
    GrammarCompiler,
    LlguidanceConstraint,
    free_grammar,
)
from strata.interfaces.grammar.files import read_grammar
from strata.interfaces.grammar.source import MAX_BYTES, Grammar, choice, regex
from strata.interfaces.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def constraint(compiler: GrammarCompiler, grammar: Grammar) -> LlguidanceConstraint:
    return compiler.compile(compiler.alone(grammar))


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


NAMES = st.text('abcü"\\ {}:', min_size=1, max_size=6)
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-999, 999), st.integers(0, 999)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    ),
    st.lists(NAMES | st.integers(-5, 5) | st.none(), min_size=1, max_size=4).map(
        lambda given: {"enum": given}
    ),
    NAMES.map(lambda text: {"const": text}),
    st.sampled_from(["^[a-c]{1,4}$", "^\\d{4}-\\d{2}$", "^(yes|no)$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
        st.tuples(st.dictionaries(NAMES, inner, max_size=4), st.integers(0, 4)).map(lambda t: _object(*t)),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_whatever_a_model_wants_the_answer_is_valid(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: dict[str, Any], seed: int
) -> None:
    text = written(tokenizer, constraint(compiler, Grammar(schema=schema)), seed)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(text), schema, format_checker=checker)


@pytest.mark.parametrize("file", ["schema", "grammar"])
def test_files_of_the_command_line(file: str, tmp_path: Path) -> None:
    """A mark at the beginning is skipped; a size is told before anything that may follow from a cut."""
    path = tmp_path / "file"
    text, most = ('{"type": "null"}', MAX_BYTES) if file == "schema" else ('root ::= "null"', MAX_WRITTEN)

    def read() -> Grammar | None:
        return read_grammar(path, None) if file == "schema" else read_grammar(None, path)

    path.write_bytes(text.encode("utf-8-sig"))
    assert read() is not None
    path.write_text("\u00e9" * most)  # cut inside a character, and no JSON either way
    with pytest.raises(UsageError, match=f"has {2 * most} bytes, {most} are allowed"):
        read()
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        read()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"maximum": NaN}', "NaN is no JSON number"),
        ('{"maximum": 1e999}', "1e999 is larger"),
        ('{"maximum": %s}' % ("9" * 5000), "4300 digits"),
        ("[" * 5000, "nested"),
        ("[]", "no JSON object"),
        ("{", "at character 1"),
    ],
)
def test_schema_files_that_are_none(text: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "schema").write_text(text)
    with pytest.raises(UsageError, match=cause):
        read_grammar(tmp_path / "schema", None)


@pytest.mark.parametrize("text", ["yes", "no", 'a "quoted" one\n', "é\\"])
def test_choices(tokenizer: Tokenizer, compiler: GrammarCompiler, text: str) -> None:
    texts = ["yes", "no", 'a "quoted" one\n', "é\\"]
    following = constraint(compiler, choice(texts))
    ids = tokenizer.encode(text)
    assert following.legal([], [*ids, min(tokenizer.stop_ids)]) == len(ids) + 1
    assert following.legal([], tokenizer.encode("maybe")) == 0
    assert {written(tokenizer, constraint(compiler, choice(texts)), seed) for seed in range(40)} == set(texts)


def test_the_end_is_allowed_only_where_the_grammar_ends(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    following = constraint(compiler, regex(r"[0-9]{3}/?"))
    for text, ends in (("", False), ("1", False), ("12", False), ("123", True), ("123/", True)):
        ids = tokenizer.encode(text)
        allowed = following.allowed(ids)
        assert [bool(allowed[index]) for index in tokenizer.stop_ids] == [ends] * len(tokenizer.stop_ids), (
            text
        )
        for stop in tokenizer.stop_ids:
            assert following.legal(ids, [stop]) == int(ends)
    assert set(np.flatnonzero(following.allowed(tokenizer.encode("123/")))) == tokenizer.stop_ids


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        (r"a\\/b", "a\\/b"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        ("[/]", "/"),
    ],
)
def test_slashes_and_line_breaks_in_regular_expressions(
    tokenizer: Tokenizer, compiler: GrammarCompiler, pattern: str, text: str
) -> None:
    """As they are, and escaped, as JavaScript has to write slashes."""
    assert written(tokenizer, constraint(compiler, regex(pattern)), 0) == text


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), places=st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_positions_may_be_asked_in_any_order(
    tokenizer: Tokenizer, compiler: GrammarCompiler, seed: int, places: list[int]
) -> None:
    """As drafts are verified and thrown away: the answer before a position decides, not what was asked."""
    schema = _object({"name": {"type": "string", "maxLength": 20}, "ages": {"items": {"type": "integer"}}}, 2)
    answer = tokenizer.encode('{"name": "Ada {\\n} L", "ages": [1, 22, 333]}')
    used, random = constraint(compiler, Grammar(schema=schema)), np.random.default_rng(seed)
    for place in places:
        before = answer[: place % (len(answer) + 1)]
        junk = [int(i) for i in random.integers(0, tokenizer.vocab_size, 3)]
        used.legal(before, junk)
        fresh = constraint(compiler, Grammar(schema=schema))
        assert np.array_equal(used.allowed(before), fresh.allowed(before))
        assert used.legal(before, answer[len(before) :]) == len(answer) - len(before)
        assert used.legal(before, junk) == fresh.legal(before, junk)


def test_an_answer_that_is_none_is_refused_and_forgotten(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    following = constraint(compiler, choice(["yes", "no"]))
    with pytest.raises(RequestError, match="does not follow"):
        following.allowed(tokenizer.encode("maybe"))
    assert following.legal([], tokenizer.encode("yes"))


REFUSED = {
    "enum": [],
    "type": "mystery",
    "minLength": {"type": "string", "minLength": 3, "maxLength": 1},
    "allOf": [{"type": "integer"}, {"type": "string"}],
    "not": {"type": "integer"},
    "$ref": "https://example.org/schema.json",
    "pattern": {"type": "string", "pattern": "("},
    "oneOf": [{"type": "integer"}, {"type": "number"}],
    "uniqueItems": {"type": "array", "uniqueItems": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_nothing_can_follow_are_refused_with_a_reason(
    compiler: GrammarCompiler, name: str
) -> None:
    given = REFUSED[name]
    schema = given if isinstance(given, dict) and name in given else {name: given}
    with pytest.raises(RequestError, match=r"the grammar cannot be used: .{10}"):
        constraint(compiler, Grammar(schema=schema))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(schema={"type": "integer", "multipleOf": 10_000_019}),
        Grammar(schema={"type": "number", "multipleOf": 1_000_003e-6}),
        Grammar(schema={"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
        Grammar(lark='start: %json {"type": "integer", "multipleOf": 10000019}'),
    ],
)
def test_multiples_that_would_take_minutes_are_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with soon(), pytest.raises(RequestError, match=r"multipleOf .* 100000 are allowed"):
        constraint(compiler, grammar)


@pytest.mark.parametrize("multiple", [0.01, 0.5, 7, 100, 10**4])
def test_usual_multiples_are_taken(compiler: GrammarCompiler, multiple: float) -> None:
    with soon():
        constraint(compiler, Grammar(schema={"type": "number", "multipleOf": multiple, "maximum": 10**9}))


def test_a_reason_is_short(compiler: GrammarCompiler) -> None:
    """The library's words may repeat the pattern."""
    with pytest.raises(RequestError) as caught:
        constraint(compiler, regex("(" * 60_000 + ")" * 60_000))
    assert len(str(caught.value)) < 700


def test_what_is_known_does_not_wait_for_what_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = compiler.alone(choice(["yes", "no"]))
    compiler.compile(known)
    begun, go_on = threading.Event(), threading.Event()
    original = compiler._matcher

    def slow(source: str) -> Any:
        begun.set()
        assert go_on.wait(SECONDS)
        return original(source)

    monkeypatch.setattr(compiler, "_matcher", slow)
    other = threading.Thread(target=compiler.compile, args=(compiler.alone(choice(["maybe"])),))
    other.start()
    assert begun.wait(SECONDS)
    assert compiler.compile(known).allowed([]).any()
    assert other.is_alive()
    go_on.set()
    other.join(SECONDS)
    assert not other.is_alive()


def test_lenient_schemas_hold_as_far_as_grammars_go(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}
    text = written(
        tokenizer, constraint(compiler, Grammar(schema={**schema, "uniqueItems": True}, lenient=True)), 1
    )
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(schema={"enum": [f"a text with the number {n}" for n in range(9000)]}),
        regex("(" + "|".join(f"[{n % 10}a-z]+{n}" for n in range(9000)) + "){5}"),
        choice([f"a text with the number {n}" for n in range(20000)]),
    ],
)
def test_enormous_grammars_end_soon(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Refused by length, or by the library's limits, or compiled: in any case it does not hang."""
    try:
        constraint(compiler, grammar).allowed([])
    except RequestError as error:
        assert "grammar" in str(error)


def test_lengths_are_bounded(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=f"{MAX_BYTES} are allowed"):
        compiler.alone(choice(["x" * MAX_BYTES]))
    with pytest.raises(RequestError, match=f"{MAX_WRITTEN} are allowed"):
        free_grammar("start: " + "x" * MAX_WRITTEN)
    for long in ("root ::= " + "x" * MAX_GBNF, "\n" * MAX_WRITTEN):
        with pytest.raises(RequestError, match=f"{MAX_GBNF} are allowed"):
            free_grammar(long)


def test_options_of_the_schema_are_ours(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """x-guidance in a client's schema could let white space grow without end."""
    schema = {"type": "array", "maxItems": 0, "x-guidance": {"whitespace_pattern": " *"}}
    following = constraint(compiler, Grammar(schema=schema))
    assert following.legal([], tokenizer.encode("[" + " " * 100 + "]")) < len(
        tokenizer.encode("[" + " " * 100)
    )
    assert following.legal([], tokenizer.encode("[ ]")) == len(tokenizer.encode("[ ]"))


@pytest.mark.parametrize(
    "text", ['root ::= "a" b\nb ::= [0-9]{2} | "x"', '%llguidance {}\nstart: "a" ( /[0-9]{2}/ | "x" )']
)
def test_gbnf_and_lark(tokenizer: Tokenizer, compiler: GrammarCompiler, text: str) -> None:
    found = {written(tokenizer, constraint(compiler, free_grammar(text)), seed) for seed in range(12)}
    assert all(one == "ax" or (one[0] == "a" and one[1:].isdigit() and len(one) == 3) for one in found)
    assert len(found) > 2


@pytest.mark.parametrize("text", ["start: unknown", "????", 'root ::= root "a"'])
def test_broken_grammars(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(RequestError, match="grammar"):
        constraint(compiler, free_grammar(text)).allowed([])
