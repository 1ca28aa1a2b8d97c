"""Where chat templates run: jinja2's sandbox with a budget of time, steps and memory.

Templates come from strangers' checkpoints. jinja2's sandbox keeps them away from Python; what it lets pass is
using up the machine, so every place where a template can repeat itself or grow a value is watched: loops,
calls, filters, arithmetic and joined text. All of it happens inside the rendering thread, without signals or
tracing, so it works off the main thread too.

The environment is otherwise the one templates are written for (that of transformers' apply_chat_template).
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata.errors import TemplateError
from strata.interfaces.control_tokens import MARKS

MAX_RANGE = 100_000  # jinja2's sandbox has the same, and an OverflowError


@dataclass(frozen=True)
class Limits:
    """What one rendering may use. steps: loop rounds, calls and filters; size: characters of any value."""

    seconds: float = 5.0
    steps: int = 1_000_000
    size: int = 16 * 2**20


# Filters and methods of text whose integer argument is a width, or a number of items or digits.
_WIDENING = frozenset(
    ("center", "ljust", "rjust", "zfill", "indent", "tojson", "batch", "slice", "round", "format")
)
_PASSED_BY_JINJA = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


class LimitError(TemplateError):
    """A rendering used up its time, steps or memory."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, remedy="it is broken or hostile: name another in the config (chat.template)")


class _Budget(threading.local):
    """What is left for the rendering that this thread is doing."""

    steps = 0
    deadline = 0.0


class GenerationTag(Extension):
    """`{% generation %}` marks an assistant's part for training; here it only contains text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits. `start()` begins one rendering in the calling thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: Limits, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.limits = limits
        self._budget = _Budget()
        self.finalize = self._check_size
        for name in ("lipsum", "range"):
            del self.globals[name]
        self.globals.update(
            range=self._range,
            raise_exception=_raise,
            strftime_now=lambda form: now().strftime(form),
            namespace=_Namespace,
        )
        for name in ("random", "urlize", "wordwrap", "pprint"):  # not repeatable, or slow on hostile text
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters["from_json"] = json.loads
        self.filters = {name: self._watched(name, function) for name, function in self.filters.items()}

    def start(self) -> None:
        """A rendering begins in this thread."""
        self._budget.steps = self.limits.steps
        self._budget.deadline = time.monotonic() + self.limits.seconds

    def tick(self) -> None:
        """One step. Raises LimitError when steps or time are used up."""
        self._budget.steps -= 1
        if self._budget.steps < 0:
            raise LimitError(f"the chat template took more than {self.limits.steps} steps")
        if time.monotonic() > self._budget.deadline:
            raise LimitError(f"the chat template ran for more than {self.limits.seconds:g} s")

    def watch_loop(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a `for` statement, one step each."""
        for item in items:
            self.tick()
            yield item

    def concat(self, parts: Iterable[str]) -> str:
        """Join text, but not beyond the size limit."""
        size, kept = 0, []
        for part in parts:
            size += len(part)
            self._check(size)
            kept.append(part)
        return "".join(kept)

    def join_operands(self, *parts: Any) -> str:
        """The `~` operator."""
        return self.concat(str(self._check_size(part)) for part in parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Some templates append to lists and pop from them; the conversation they see is a copy.

        Bytes and numbers have no method that a prompt needs, but some that fill the memory:
        `(1).to_bytes(10**10, 'big')`, `'x'.encode().center(10**10)`.
        """
        if isinstance(obj, (bytes, int, float)):
            return False
        if attr in ("append", "pop") and isinstance(obj, list):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes passes here."""
        self.tick()
        if isinstance(getattr(function, "__self__", None), str):
            return self._call_text_method(context, function, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result can be far larger than their operands."""
        self.tick()
        if operator == "**":
            self._check(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "*":
            self._check(_product(left, right))
        elif operator == "%" and isinstance(left, str):
            given = right if isinstance(right, tuple) else (right,)
            self._check(self._weight((left, right)) + _widths(left) + _largest_int(given))
        elif operator == "+":
            self._check(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Hook of jinja2 before code is made: watch loops and joins that no other hook sees."""
        for loop in source.find_all(nodes.For):
            loop.iter = self._own_call("watch_loop", [loop.iter], loop.lineno)  # type: ignore[list-item]
        _replace_concats(source, lambda node: self._own_call("join_operands", node.nodes, node.lineno))
        return super()._generate(source, *args, **kwargs)

    def _own_call(self, method: str, args: list[nodes.Expr], line: int) -> nodes.Expr:
        target = nodes.EnvironmentAttribute(method, environment=self)
        call = nodes.Call(target, args, [], None, None, environment=self)
        call.set_lineno(line, override=True)
        return call

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts as a step and neither takes nor returns more than the size limit."""

        @functools.wraps(function)  # keeps jinja2's "pass me the environment" marks
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            args = tuple(list(self.watch_loop(a)) if isinstance(a, Iterator) else a for a in args)
            given = [a for a in args if not isinstance(a, _PASSED_BY_JINJA)]
            widths = _largest_int((*given[1:], *kwargs.values())) if name in _WIDENING else 0
            widths += _widths(given[0]) if name == "format" else 0
            self._check(self._weight((args, kwargs)) + widths + _repeated(name, given, kwargs))
            return self._check_size(function(*args, **kwargs))

        return watched

    def _call_text_method(
        self, context: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`'x'.center(10**9)` and its like: bound the result before it exists."""
        text, name = function.__self__, function.__name__
        args = tuple(list(self.watch_loop(a)) if isinstance(a, Iterator) else a for a in args)
        size = self._weight((text, args, kwargs))
        if name in _WIDENING:
            size += _largest_int((*args, *kwargs.values()))
        elif name == "expandtabs":
            size += text.count("\t") * _largest_int((8, *args, *kwargs.values()))
        elif name == "join":
            size += _repeated(name, [*args, text], kwargs)
        else:
            size += _repeated(name, [text, *args], kwargs)
        self._check(size)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2's own guard of `str.format`, with the width of fields bounded as well."""
        guarded = super().wrap_str_format(value)
        if guarded is None:
            return None

        @functools.wraps(guarded)
        def measured(*args: Any, **kwargs: Any) -> str:
            widths = _widths(value.__self__) + _largest_int((*args, *kwargs.values()))
            self._check(self._weight((value.__self__, args, kwargs)) + widths)
            return guarded(*args, **kwargs)

        return measured

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise LimitError(f"the chat template asks for range() of {len(numbers)}, more than {MAX_RANGE}")
        return numbers

    def _check_size(self, value: Any) -> Any:
        self._check(self._weight(value))
        return value

    def _check(self, size: int) -> None:
        if size > self.limits.size:
            raise LimitError(f"the chat template makes a value of more than {self.limits.size} characters")

    def _weight(self, value: Any) -> int:
        """Characters of a value when written out, counted no further than the limit."""
        size, pending = 0, [value]
        while pending and size <= self.limits.size:
            item = pending.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                size += 8 * len(item)
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                size += 8 * len(item)
                pending += item
        return size


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that reach into Python objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts want it: not escaped for HTML. Marks of control tokens survive `ensure_ascii`."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        for mark in MARKS:
            escape = re.escape(json.dumps(mark)[1:-1])
            text = re.sub(rf"(?<!\\)((?:\\\\)*){escape}", rf"\1{mark}", text)
    return text


def _replace_concats(node: nodes.Node, make: Callable[[nodes.Concat], nodes.Expr]) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_concats(item, make)
                    if isinstance(item, nodes.Concat):
                        value[index] = make(item)
        elif isinstance(value, nodes.Node):
            _replace_concats(value, make)
            if isinstance(value, nodes.Concat):
                setattr(node, field, make(value))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _product(left: Any, right: Any) -> int:
    """Size of `left * right`: a repeated sequence, or the bits of a product."""
    if isinstance(left, int) and isinstance(right, int):
        return (_bits(left) + _bits(right)) * 256  # integers stay below 64 Ki bits at the default limit
    times = right if isinstance(right, int) else left
    items = left if isinstance(right, int) else right
    return _length(items) * max(times, 0) if isinstance(times, int) else 0


def _repeated(name: str, args: list[Any], kwargs: dict[str, Any]) -> int:
    """Characters that a filter writes over and over: replace(text, old, new) or join(items, separator)."""
    values = [*args, *kwargs.values()]
    if name == "replace" and len(values) > 2:
        return str(values[0]).count(str(values[1])) * len(str(values[2]))
    if name == "translate" and len(values) > 1 and isinstance(values[1], dict):
        return len(str(values[0])) * max((len(str(value)) for value in values[1].values()), default=0)
    if name == "join" and len(values) > 1 and hasattr(values[0], "__len__"):
        return len(values[0]) * len(str(values[1]))
    return 0


def _largest_int(values: Iterable[Any]) -> int:
    """The largest integer among arguments: any of them may be a width."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _widths(text: Any) -> int:
    """The largest width that a format string asks for, as in `%9d` or `{:>9}`."""
    if not isinstance(text, str):
        return 0
    return max((int(digits) for digits in re.findall(r"[%{:][^\s%{}]{0,9}?(\d{1,18})", text)), default=0)
