"""What the commands share about the terminal: notes, safe text, Ctrl-C as a flag, reading piped input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import IO

import click

from strata.errors import UsageError

MAX_STDIN_BYTES = 64 << 20
_SAFE_CONTROLS = "\n\t"


def note(text: str) -> None:
    """A remark on stderr, so that stdout holds the answer and nothing else."""
    click.echo(click.style(printable(text), dim=True) if styled(sys.stderr) else printable(text), err=True)


def styled(stream: IO[str] | None) -> bool:
    """Whether escape sequences are welcome there; None: the stream was closed when the program began."""
    return (
        stream is not None
        and stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and "NO_COLOR" not in os.environ
    )


def watched() -> bool:
    """Whether somebody reads remarks as they come: stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def printable(text: str) -> str:
    """Text without control characters: a model's output or a file's name must not drive the terminal."""
    return "".join(c if c.isprintable() or c in _SAFE_CONTROLS else f"\\x{ord(c):02x}" for c in text)


def show(report: object) -> None:
    """A report on stdout: text as it is read by people, anything else as JSON."""
    click.echo(printable(report) if isinstance(report, str) else json.dumps(report, indent=2))


def os_error_text(error: OSError) -> str:
    """File and reason, without the number."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"


def write(text: str) -> None:
    """A piece of an answer on stdout, at once; control characters pass only where no terminal reads them."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def valid_text(text: str) -> tuple[str, int]:
    """Text with every byte that was not UTF-8 (a lone surrogate) replaced by U+FFFD, and their number."""
    bad = sum("\ud800" <= c <= "\udfff" for c in text)
    return ("".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text) if bad else text), bad


def read_stdin() -> str:
    """All of piped stdin as one prompt, without the newline that `echo` adds.

    Bytes that are not UTF-8 are replaced, and a note says so (a console in another encoding, a cut file).
    """
    if sys.stdin is None:  # started with stdin closed
        return ""
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise UsageError(f"more than {MAX_STDIN_BYTES} bytes of input", remedy="send a shorter prompt")
    text, bad = valid_text(data.decode("utf-8", errors="surrogateescape"))
    if bad:
        note(f"note: {bad} bytes of the input are not UTF-8 and were replaced by \ufffd")
    return text[:-1] if text.endswith("\n") else text


class Interrupt:
    """Ctrl-C while an answer is generated: the first asks politely, the next raises KeyboardInterrupt.

    The engine looks at `requested` between steps, so the engine is never left in the middle of a step.
    """

    def __init__(self) -> None:
        self.requested = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[Interrupt]:
        """Catches SIGINT for the duration of the block."""
        self.requested = False
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)
