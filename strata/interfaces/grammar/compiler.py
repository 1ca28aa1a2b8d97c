"""From a grammar's text to a request's constraint, by llguidance, which is imported when first needed."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata.errors import RequestError
from strata.interfaces.grammar.source import Grammar, Rules
from strata.interfaces.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_WRITTEN = 64 << 10
"""Characters of a grammar that somebody wrote."""
MAX_GBNF = 16 << 10
"""Of one in GBNF. Python code turns it into Lark in quadratic time: 63,000 characters took 13 s."""
_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|start[ \t]*:)")
"""What only Lark has. Linear in the text, unlike the library's own."""
_REASON = 500
"""Characters of the library's reason: it may repeat the whole grammar."""
_KEPT = 32
"""Compiled grammars that are kept: agents send the same tools with every turn."""


class GrammarCompiler:
    """Makes constraints for one tokenizer. Any thread may call; compiling takes up to a second.

    The library bounds what a grammar may cost, and lets other threads go on meanwhile (the longest pause of
    another thread was 36 ms).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of `_compiled` and what is in it; never held for long
        self._compiling = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def rules(self) -> Rules:
        """Empty rules, whose markers are this tokenizer's control tokens."""
        controls = self._tokenizer.control_ids

        def token_id(text: str) -> int | None:
            index = self._tokenizer.token_id(text)
            return index if index in controls else None

        return Rules(token_id)

    def alone(self, grammar: Grammar) -> str:
        """The source of an answer that is nothing but this."""
        rules = self.rules()
        return rules.source(rules.grammar(grammar))

    def compiled(self, source: str) -> Callable[[], LlguidanceConstraint]:
        """Makes constraints, one for each request. Raises RequestError with the library's reason."""
        matcher = self._known(source)
        if matcher is None:
            with self._compiling:  # what is known already does not wait for this
                matcher = self._known(source) or self._keep(source, self._matcher(source))
        return lambda: self._copy(matcher)

    def compile(self, source: str) -> LlguidanceConstraint:
        """One constraint. Raises what `compiled` raises."""
        return self.compiled(source)()

    def _known(self, source: str) -> LLMatcher | None:
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
            return self._compiled.get(source)

    def _keep(self, source: str, matcher: LLMatcher) -> LLMatcher:
        with self._lock:
            self._compiled[source] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _copy(self, matcher: LLMatcher) -> LlguidanceConstraint:
        with self._lock:
            return LlguidanceConstraint(matcher.deep_copy(), self._tokenizer.stop_ids)

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # else an error repeats the grammar
        matcher = LLMatcher(self._library_tokenizer, source, log_level=0, limits=limits)
        # The first mask takes longest, up to 56 ms: here and not in the engine's thread.
        begins = not matcher.is_error() and any(matcher.compute_bitmask())
        if not begins or matcher.is_error():
            reason = _reason(matcher) or "no answer follows it"
            raise RequestError(f"the grammar cannot be used: {reason}")
        return matcher

    @cached_property
    def _library_tokenizer(self) -> LLTokenizer:
        """Takes about a second for 150,000 tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer))
        stops = sorted(i for i in self._tokenizer.stop_ids if 0 <= i < self._tokenizer.vocab_size)
        return LLTokenizer(wrapped, n_vocab=self._tokenizer.vocab_size, eos_token=stops or None)


class LlguidanceConstraint:
    """`core.Constraint`: follows the answer that it is asked about, forwards and back."""

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._taken: list[int] = []

    def allowed(self, answer: list[int]) -> NDArray[np.bool_]:
        """See `core.Constraint`; the ids are the tokenizer's, rounded up to whole bytes."""
        self._go_to(answer)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def legal(self, answer: list[int], draft: list[int]) -> int:
        """See `core.Constraint`. Nothing follows a stop id."""
        self._go_to(answer)
        before = self._before_stop(draft)
        count = int(self._matcher.validate_tokens(before)) if before else 0
        if count < len(before) or len(before) == len(draft):
            return count
        self._go_to(answer + before)
        return count + bool(self._matcher.is_accepting())

    def _go_to(self, answer: list[int]) -> None:
        answer = self._before_stop(answer)
        same = common_length(self._taken, answer)
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        fresh = answer[same:]
        count = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._taken += fresh[:count]
        self._check()
        if count < len(fresh):
            raise RequestError(f"token {fresh[count]} of the answer does not follow its grammar")

    def _before_stop(self, tokens: list[int]) -> list[int]:
        """Without what ends them: the library takes one of its stop ids only, and not everywhere."""
        if self._stop_ids.isdisjoint(tokens):
            return tokens
        return tokens[: next(n for n, token in enumerate(tokens) if token in self._stop_ids)]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar has become too costly: {_reason(self._matcher)}", remedy="simplify it"
            )


class _Vocabulary:
    """A tokenizer as llguidance's `TokenizerWrapper` wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.stop_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def common_length(first: list[int], second: list[int]) -> int:
    """How many items from the beginning are the same; usually all of the first."""
    if second[: len(first)] == first:
        return len(first)
    return next(n for n, (a, b) in enumerate(zip([*first, None], [*second, None], strict=False)) if a != b)


def _reason(matcher: LLMatcher) -> str:
    """The library's words in one line; its word for a dead end says little."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return "no answer follows it" if text.startswith("NoExtension") else _short(text)


def _short(text: str) -> str:
    return text if len(text) <= _REASON else text[: _REASON - 4] + " ..."


def free_grammar(text: str) -> Grammar:
    """A grammar that somebody wrote, in Lark or in llama.cpp's GBNF. Raises RequestError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    most = MAX_WRITTEN if _LARK.search(text[:MAX_WRITTEN]) else MAX_GBNF
    if len(text) > most:
        raise RequestError(f"the grammar has {len(text)} characters, {most} are allowed")
    try:
        return Grammar(lark=text if most == MAX_WRITTEN else gbnf_to_lark(text))
    except Exception as error:  # whatever the library's parser meets
        raise RequestError(f"the grammar cannot be read: {_short(' '.join(str(error).split()))}") from error
