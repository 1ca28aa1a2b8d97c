"""Hostile chat templates: cut by time, steps and size, and kept away from Python. case-14"""

from __future__ import annotations

import resource
import threading

import pytest
from hangs import soon

from strata.errors import TemplateError
from strata.interfaces.chat_template import ChatTemplate
from strata.interfaces.sandbox import Limits

MESSAGES = [{"role": "user", "content": "Hi"}]
GROW = "{% set ns = namespace(s='xx', l=[1], n=3) %}{% for i in range(60) %}"
QUICK = Limits(seconds=1.0, steps=100_000, size=2**20)

ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "growing list": "{% set l = [1] %}{% for i in l %}{% set _ = l.append(1) %}{% endfor %}",
    "branching macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "repeat": "{{ 'x' * 10**10 }}",
    "repeat a list": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 2 ** (2 ** 100) }}",
    "squares": GROW + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "plus": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "plus on lists": GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "tilde": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "block": GROW + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "replace": GROW + "{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "replace filter": GROW + "{% set ns.s = ns.s|replace('x', ns.s) %}{% endfor %}",
    "nested list": GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested json": GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    "join": "{{ ('x' * 10000).join(range(99999)|map('string')|list) }}",
    "join filter": "{{ range(99999)|join('x' * 10000) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format width": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "format map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "json indent": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "bytes of text": "{{ 'x'.encode().center(10**10) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_templates_are_cut(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with soon(), pytest.raises(TemplateError):
        ChatTemplate(source, limits=QUICK).render(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_limits_work_in_any_thread() -> None:
    """The server renders in worker threads, where signals do not exist."""
    errors: list[Exception] = []
    subject = ChatTemplate(ENDLESS["nested loops"], limits=Limits(seconds=0.3, steps=10**9))

    def render() -> None:
        try:
            subject.render(MESSAGES)
        except TemplateError as error:
            errors.append(error)

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [str(error).split("\n")[0] for error in errors] == [
        "the chat template ran for more than 0.3 s"
    ] * 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__init__ }}",
    ],
)
def test_templates_do_not_reach_python(source: str) -> None:
    """Either an error or nothing at all."""
    try:
        text = ChatTemplate(source).render(MESSAGES)
    except TemplateError:
        return
    assert text.strip() == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'x'|klingon }}", "line 1: No filter named 'klingon'"),
        ("\n{% for %}", "line 2"),
        (
            "{{ raise_exception('only two roles, please') }}",
            "refused the conversation: only two roles, please",
        ),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read"),
        ("x" * 2**21, "2097152 characters; 1048576 are allowed"),
        ("{{ range(10**6) }}", "range"),
    ],
)
def test_errors_say_what_is_wrong(source: str, words: str) -> None:
    """case-14: a request error with the template's message, never a stack trace."""
    with pytest.raises(TemplateError, match=None) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert words in str(caught.value)


def test_large_honest_values_pass() -> None:
    """Limits look at sizes, not at numbers that occur in data."""
    big = {"timestamp": 10**18, "format": "%999999999d {:>999999999}", "digits": "9" * 5000}
    messages = [{"role": "user", "content": "%999999999d " + "x" * 2**20, "extra": big}]
    source = "{{ messages[0].extra|tojson }}{{ messages[0].content|trim }}{{ messages[0].content.strip() }}"
    text = ChatTemplate(source).render(messages)
    assert len(text) > 2 * 2**20 and str(10**18) in text


def test_a_long_conversation_is_no_endless_template() -> None:
    messages = [{"role": "user", "content": "words " * 200}, {"role": "assistant", "content": "more"}] * 1000
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}{% endfor %}"
    assert ChatTemplate(source).render(messages).count("<user>") == 1000
