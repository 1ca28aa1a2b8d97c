"""The chat in a real terminal (a pty): keys, pastes, signals, ends of input (case-45, case-11, case-31)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.interfaces.line_reader import PlainReader

pexpect = pytest.importorskip("pexpect")

ROOT = Path(__file__).resolve().parents[2]
READY = r"\x1b\[\?2004h.*?> ?"  # prompt-toolkit switches bracketed paste on when it reads


class Terminal:
    """The chat driver in a pty."""

    def __init__(
        self, history: str = "none", term: str = "xterm", context: int = 1000, delay: float = 0.0
    ) -> None:
        self.plain = term == "dumb"
        self.child = pexpect.spawn(
            sys.executable,
            [str(Path(__file__).with_name("chat_driver.py")), str(context), str(delay), history],
            env={**os.environ, "TERM": term, "PYTHONPATH": str(ROOT)},
            timeout=20,
            dimensions=(24, 200),
        )
        self.ready()

    def ready(self) -> None:
        self.child.expect("> " if self.plain else READY)

    def say(self, text: str, answer: str) -> None:
        self.child.send(text + "\r")
        self.child.expect_exact(answer.encode())
        self.ready()

    def leave(self, code: int = 0, calls: int | None = None) -> str:
        """Waits for the end; every answer must have been closed."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        rest: str = self.child.before.decode(errors="replace")
        assert self.child.exitstatus == code, rest
        assert "Traceback" not in rest
        assert "open 0" in rest
        if calls is not None:
            assert f"calls {calls} " in rest
        return rest


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.child.close(force=True)


@pytest.fixture(params=["xterm", "dumb"])
def terminal(request: pytest.FixtureRequest, terminals: list[Terminal]) -> Terminal:
    terminals.append(Terminal(term=request.param))
    return terminals[-1]


def test_messages_are_answered_until_ctrl_d(terminal: Terminal) -> None:
    terminal.say("hello", "HELLO\r\n")
    terminal.say("na\u00efve", "NA\u00cfVE\r\n")
    terminal.child.sendeof()
    terminal.leave(calls=2)


def test_empty_lines_never_reach_the_model(terminal: Terminal) -> None:
    """case-11: Enter alone is a new prompt."""
    for text in ("", "   ", "\t"):
        terminal.child.send(text + "\r")
        terminal.ready()
    terminal.child.sendeof()
    terminal.leave(calls=0)


def test_ctrl_c_twice_at_the_prompt_leaves_with_130(terminal: Terminal) -> None:
    terminal.child.sendintr()
    terminal.child.expect_exact("(Ctrl-C again leaves)")
    terminal.ready()
    terminal.say("still here", "STILL HERE")
    terminal.child.sendintr()
    terminal.ready()
    terminal.child.sendintr()
    terminal.leave(code=130, calls=1)


def test_a_plain_line_is_awaited_where_ctrl_c_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """input() is entered only when there is a line: a Ctrl-C just before it blocks would be lost."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", lambda: pytest.fail("input() would block"))
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(KeyboardInterrupt):
                PlainReader().read()
            os.write(ours, b"a line\n")
            monkeypatch.setattr("builtins.input", lambda: terminal.readline().rstrip())
            assert PlainReader().read() == "a line"
        finally:
            signal.signal(signal.SIGALRM, previous)
            os.close(ours)


def test_exit_and_unknown_commands(terminal: Terminal) -> None:
    terminal.child.send("/exti\r")
    terminal.child.expect_exact("did you mean /exit?")
    terminal.ready()
    terminal.child.send("/exit\r")
    terminal.leave(calls=0)


def test_a_backslash_continues_the_message(terminal: Terminal) -> None:
    terminal.child.send("one\\\r")
    terminal.child.expect_exact("...")
    terminal.child.send("two\r")
    terminal.child.expect_exact("ONE\r\nTWO\r\n")
    terminal.ready()
    terminal.child.sendeof()
    terminal.leave(calls=1)


def test_bytes_that_are_not_utf8_are_replaced_with_a_note(terminal: Terminal) -> None:
    """case-45: an invalid line is answered, and the user is told."""
    terminal.child.send(b"caf\xe9 au lait\r")
    terminal.child.expect_exact("1 bytes of the message are not UTF-8")
    terminal.child.expect_exact("CAF\ufffd AU LAIT".encode())
    terminal.ready()
    terminal.child.sendeof()
    terminal.leave(calls=1)


def test_alt_enter_begins_a_line(terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal())
    terminal.child.send("one\x1b\rtwo\r")
    terminal.child.expect_exact("ONE\r\nTWO\r\n")
    terminal.ready()
    terminal.child.sendeof()
    terminal.leave(calls=1)


def test_a_paste_is_one_message(terminals: list[Terminal]) -> None:
    """case-45: 5 kB with newlines arrive as one message."""
    terminals.append(terminal := Terminal(context=100_000))
    lines = [f"pasted line {i:03d}" for i in range(300)]
    terminal.child.send("\x1b[200~" + "\n".join(lines) + "\x1b[201~")
    terminal.child.send("\r")
    terminal.child.expect_exact("\r\n".join(lines[-2:]).upper())
    terminal.ready()
    terminal.child.sendeof()
    terminal.leave(calls=1)


def test_ctrl_c_stops_an_answer_and_keeps_its_part(terminals: list[Terminal], tmp_path: Path) -> None:
    terminals.append(terminal := Terminal(delay=0.05))
    terminal.child.send("abcdefghijklmnopqrstuvwxyz" * 8 + "\r")
    terminal.child.expect_exact("ABCDEF")
    terminal.child.sendintr()
    terminal.child.expect_exact("(stopped)")
    terminal.ready()
    saved = tmp_path / "chat.json"
    terminal.child.send(f"/save {saved}\r")
    terminal.child.expect_exact("2 messages saved")
    terminal.ready()
    assert '"content": "ABCDEF' in saved.read_text()
    terminal.child.sendeof()
    terminal.leave(calls=1)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_context_overflow_and_reset(terminals: list[Terminal], term: str) -> None:
    """case-31: beyond the context the chat gives both numbers and the remedy, and goes on."""
    terminals.append(terminal := Terminal(term=term, context=60))
    terminal.say("x" * 40, "(the context of 60 tokens is full: /reset")
    terminal.child.send("y\r")
    terminal.child.expect(r"the prompt has \d+ tokens but the context holds 60")
    terminal.child.expect_exact("/reset")
    terminal.ready()
    terminal.child.send("/reset\r")
    terminal.ready()
    terminal.say("short", "SHORT")
    terminal.child.sendeof()
    terminal.leave(calls=2)


def test_history_survives_and_is_private(terminals: list[Terminal], tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    terminals.append(first := Terminal(history=str(history)))
    first.say("remember me", "REMEMBER ME")
    first.child.send(b"\xff\r")  # not UTF-8: kept as U+FFFD
    first.ready()
    first.child.sendeof()
    first.leave(calls=2)
    terminals.append(second := Terminal(history=str(history)))
    second.child.send("\x1b[A\x1b[A\r")  # arrow up, twice
    second.child.expect_exact("REMEMBER ME")
    second.ready()
    second.child.sendeof()
    second.leave(calls=1)
    assert history.stat().st_mode & 0o077 == 0


def test_a_history_that_cannot_be_written_is_a_note(terminals: list[Terminal], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    terminals.append(terminal := Terminal(history=str(blocked / "history")))
    terminal.say("works", "WORKS")
    terminal.child.sendeof()
    terminal.leave(calls=1)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_answers_alone_go_into_a_file(store: Path, tmp_path: Path, term: str) -> None:
    """The whole command on a terminal with stdout redirected: prompts stay on the terminal."""
    answers = tmp_path / "answers"
    command = f"{sys.executable} -m strata run -m {store} -n 4 --temp 0 --set chat.history=none > {answers}"
    child = pexpect.spawn(
        "/bin/sh", ["-c", command], env={**os.environ, "TERM": term, "PYTHONPATH": str(ROOT)}, timeout=30
    )
    child.expect_exact("/help lists the commands")
    child.expect("> " if term == "dumb" else READY)
    child.send("hello\r")
    child.expect_exact("(max_tokens 4 reached")
    child.expect("> " if term == "dumb" else READY)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert answers.read_text().count("\n") == 1 and "hello" not in answers.read_text()
