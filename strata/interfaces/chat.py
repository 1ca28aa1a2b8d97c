"""The chat on a terminal: reads a message, streams the answer, keeps the conversation.

Enter sends; Alt-Enter, or a backslash at the end of the line, goes on in a new line; a paste is one
message whatever it holds. Ctrl-C stops an answer (what came so far stays in the conversation) and clears
a line; twice at the prompt it leaves with 130. Ctrl-D leaves with 0.
"""

from __future__ import annotations

from typing import Protocol

import click

from strata.core import FinishReason
from strata.errors import StrataError
from strata.interfaces.answer import Answer
from strata.interfaces.chat_commands import Leave, run_command
from strata.interfaces.session import Session
from strata.interfaces.terminal import Interrupt, note, os_error_text, valid_text, write

EXIT_OK, EXIT_INTERRUPTED = 0, 130


class LineReader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """One message, possibly of several lines; EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        ...


def chat(session: Session, reader: LineReader) -> int:
    """Runs until the user leaves; returns the exit code."""
    note(f"{session.title}. /help lists the commands, Ctrl-D leaves.")
    if session.remark:
        note(f"note: {session.remark}")
    interrupted = False
    while True:
        try:
            message = reader.read()
        except EOFError:
            return EXIT_OK
        except KeyboardInterrupt:
            if interrupted:
                return EXIT_INTERRUPTED
            interrupted = True
            note("(Ctrl-C again leaves)")
            continue
        interrupted = False
        try:
            respond(session, message)
        except Leave:
            return EXIT_OK
        except KeyboardInterrupt:  # a second Ctrl-C, for a step that takes long
            note("(stopped)")
        except StrataError as error:
            note(f"error: {error}")
        except OSError as error:
            note(f"error: {os_error_text(error)}")


def respond(session: Session, message: str) -> None:
    """Obeys a command or answers a message; blank lines are nothing (case-11)."""
    text, bad = valid_text(message)
    if bad:
        note(f"note: {bad} bytes of the message are not UTF-8 and were replaced by \ufffd")
    if not text.strip():
        return
    if text.startswith("//"):
        stream(session, session.ask(text[1:]))
    elif text.startswith("/"):
        answer = run_command(session, text)
        if answer is not None:
            stream(session, answer)
    else:
        stream(session, session.ask(text))


def stream(session: Session, answer: Answer) -> None:
    """Prints an answer while it is generated; Ctrl-C ends it and keeps the part that came."""
    with Interrupt().watching() as interrupt:
        try:
            for piece in answer.pieces(stop=lambda: interrupt.requested):
                write(piece)
        finally:
            session.finish(answer)
            click.echo()
    remark = _remark(session, answer)
    if remark:
        note(remark)


def _remark(session: Session, answer: Answer) -> str:
    if answer.finish_reason is FinishReason.ABORT:
        return "(stopped)"
    if answer.context_full:
        return f"(the context of {session.context} tokens is full: /reset begins a new conversation)"
    if answer.finish_reason is FinishReason.LENGTH:
        return f"(max_tokens {answer.sampling.max_tokens} reached: /set max_tokens changes it)"
    return ""
