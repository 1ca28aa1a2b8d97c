"""Reading messages from a terminal: prompt-toolkit where the cursor can move, else plain lines."""

from __future__ import annotations

import io
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strata.interfaces.terminal import note, valid_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "
CONTINUATION = "... "
_POLL_SECONDS = 0.2


def history_path(setting: str) -> Path | None:
    """The history file for the option chat.history: "auto", "none" or a path."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "strata" / "history"


def make_reader(history: Path | None) -> PlainReader | RichReader:
    """The reader that this terminal can serve."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainReader()
    return RichReader(history)


class PlainReader:
    """Lines as the terminal driver gives them; a trailing backslash goes on in the next line."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")

    def read(self) -> str:
        """One message; EOFError at the end of the input."""
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(CONTINUATION))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        sys.stderr.write(prompt)  # stdout is for answers
        sys.stderr.flush()
        # A Ctrl-C that comes just before input() blocks would be heard only after the next line: Python runs
        # signal handlers between bytecodes, so wait where there are some.
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            pass
        return input()


class RichReader:
    """Line editing, history and bracketed paste by prompt-toolkit."""

    def __init__(self, history: Path | None) -> None:
        # Asking the terminal for the cursor's position costs a warning where nothing answers (serial lines,
        # script(1)) and can swallow typed-ahead keys; only completion menus would need the answer.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            history=_history(history),
            key_bindings=_key_bindings(),
            enable_suspend=True,
            output=create_output(always_prefer_tty=True),  # `strata run > answers` prompts on stderr
        )

    def read(self) -> str:
        """One message; EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt()


def _key_bindings() -> KeyBindings:
    """multiline=True makes Enter a newline; here it sends, unless a backslash or Alt asks for a line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history(path: Path | None) -> History:
    """Lines of earlier chats. A file that cannot be written costs the history, never the chat."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class SafeHistory(FileHistory):
        def append_string(self, string: str) -> None:
            super().append_string(valid_text(string)[0])  # a lone surrogate cannot be encoded

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                note(f"note: the history is not kept: {error}")

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600, exist_ok=True)
    except OSError as error:
        note(f"note: the history is not kept: {error}")
        return InMemoryHistory()
    return SafeHistory(str(path))
