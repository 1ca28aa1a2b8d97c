"""The chat's commands and its conversation, with a model that answers by rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel

from strata.config import Config
from strata.core import FinishReason, Request
from strata.errors import ConfigError, ContextOverflowError, RequestError, UsageError
from strata.interfaces.chat import chat, respond
from strata.interfaces.chat_commands import COMMANDS, Leave
from strata.interfaces.session import Session


@pytest.fixture
def session() -> Session:
    return Session(FakeModel(), Config())  # type: ignore[arg-type]


class Script:
    """A reader that says its lines, then ends."""

    def __init__(self, *lines: Any) -> None:
        self.lines = list(lines)

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return str(line)


def roles(session: Session) -> list[str]:
    return [message["role"] for message in session.all_messages()]


def test_a_conversation_grows_and_reset_forgets_it(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    respond(session, "hello")
    respond(session, "again")
    assert capsys.readouterr().out == "HELLO\nAGAIN\n"
    assert roles(session) == ["user", "assistant"] * 2
    respond(session, "/reset")
    assert roles(session) == []


def test_help_lists_every_command(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    respond(session, "/help")
    out = capsys.readouterr().out
    assert all(command.usage in out for command in COMMANDS.values())


def test_system_prompt(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    respond(session, "/system You are terse.")
    respond(session, "hi")
    assert session.all_messages()[0] == {"role": "system", "content": "You are terse."}
    respond(session, "/system")
    assert "You are terse." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0", "temperature", 0.0),
        ("/set temp=0.5", "temperature", 0.5),
        ("/set top-k 7", "top_k", 7),
        ("/set seed 3", "seed", 3),
        ("/set max_tokens unlimited", "max_tokens", None),
        ("/set stop END", "stop", ("END",)),
        ("/set ignore_eos true", "ignore_eos", True),
    ],
)
def test_set_changes_one_option(session: Session, line: str, name: str, value: object) -> None:
    before = session.sampling
    respond(session, line)
    assert session.sampling == dataclasses.replace(before, **{name: value})


@pytest.mark.parametrize("line", ["/set nonsense 1", "/set nonsense", "/set top_p hot", "/set top_p 3"])
def test_set_refuses_and_keeps_what_was(session: Session, line: str) -> None:
    before = session.sampling
    with pytest.raises(ConfigError):
        respond(session, line)
    assert session.sampling == before


def test_set_shows_all_options(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    respond(session, "/set")
    out = capsys.readouterr().out
    assert "temperature = 0.8" in out and "seed = random" in out and "max_tokens = unlimited" in out
    assert "stop = []" in out and "ignore_eos = false" in out  # as they are written, not as Python has them
    for line in ("/set temp", "/set temperature="):
        respond(session, line)
        assert capsys.readouterr().out == "  temperature = 0.8\n"


def test_stats(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    respond(session, "/stats")
    assert "no answer yet" in capsys.readouterr().out


def test_save_and_load(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    respond(session, "/system be kind")
    respond(session, "hello \u00e9\n\x1b[2J")
    saved = session.all_messages()
    respond(session, f"/save {file}")
    other = Session(FakeModel(), Config())  # type: ignore[arg-type]
    respond(other, "something else")
    respond(other, f"/load {file}")
    assert other.all_messages() == saved


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": 3}',
        b'{"messages": [3]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_load_refuses_other_files_and_keeps_the_conversation(
    session: Session, tmp_path: Path, content: bytes
) -> None:
    respond(session, "hello")
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match="not a saved chat"):
        respond(session, f"/load {tmp_path / 'x'}")
    assert len(session.messages) == 2


def test_a_missing_file_is_an_error_and_the_chat_goes_on(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(session, Script("/load /nowhere/x", "/save /nowhere/x", "/save", "hello")) == 0
    captured = capsys.readouterr()
    assert (
        captured.err.count("error: /nowhere/x: No such file or directory\n") == 2
        and "no file name" in captured.err
    )
    assert captured.out == "HELLO\n"


def test_regenerate_answers_the_last_message_again(session: Session) -> None:
    with pytest.raises(RequestError):
        respond(session, "/regen")
    respond(session, "hello")
    respond(session, "/regen")
    assert roles(session) == ["user", "assistant"]
    assert session.model.engine.calls == 2  # type: ignore[attr-defined]


def test_a_double_slash_sends_a_slash(session: Session) -> None:
    respond(session, "//help me")
    assert session.messages[0]["content"] == "/help me"


def test_exit(session: Session) -> None:
    with pytest.raises(Leave):
        respond(session, "/exit")
    assert chat(session, Script("/exit", "never said")) == 0


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((), 0),
        ((KeyboardInterrupt, KeyboardInterrupt), 130),
        ((KeyboardInterrupt, "hello", KeyboardInterrupt), 0),
        (("", "  ", "\n\n"), 0),
    ],
)
def test_ways_to_leave(session: Session, lines: tuple[Any, ...], code: int) -> None:
    """case-45, case-11: EOF is 0, Ctrl-C twice in a row is 130, blank lines are no messages."""
    assert chat(session, Script(*lines)) == code
    assert session.model.engine.calls == lines.count("hello")  # type: ignore[attr-defined]


def test_a_message_beyond_the_context_leaves_no_trace() -> None:
    """case-31: the next message is answered."""
    session = Session(FakeModel(context=50), Config())  # type: ignore[arg-type]
    with pytest.raises(ContextOverflowError):
        respond(session, "x" * 100)
    assert session.messages == []
    respond(session, "hello")
    assert roles(session) == ["user", "assistant"]


def test_an_answer_without_text_leaves_no_trace(session: Session) -> None:
    respond(session, "/set max_tokens 0")
    respond(session, "hello")
    assert session.messages == []
    assert session.last is not None and session.last.finish_reason is FinishReason.LENGTH


def test_a_second_ctrl_c_ends_a_long_prefill_and_the_chat_goes_on(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first token the engine is inside a step: the answer is dropped, the chat is not."""
    generate = session.model.engine.generate

    def interrupted(request: Request, stop: Any) -> Iterator[int]:
        monkeypatch.setattr(session.model.engine, "generate", generate)
        raise KeyboardInterrupt
        yield 0

    monkeypatch.setattr(session.model.engine, "generate", interrupted)
    assert chat(session, Script("a long text", "hello")) == 0
    captured = capsys.readouterr()
    assert "(stopped)" in captured.err and captured.out.strip() == "HELLO"
    assert roles(session) == ["user", "assistant"]


def test_lone_surrogates_never_reach_the_model(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """case-45: what was not UTF-8 is U+FFFD."""
    respond(session, "a\udcffb")
    assert session.messages[0]["content"] == "a\ufffdb"
    assert "not UTF-8" in capsys.readouterr().err


def test_raw_prompts_stand_alone() -> None:
    session = Session(FakeModel(), Config(), raw=True)  # type: ignore[arg-type]
    respond(session, "hello")
    respond(session, "again")
    assert session.messages == []
    assert session.last is not None and session.last.request.prompt == [ord(c) for c in "again"]
