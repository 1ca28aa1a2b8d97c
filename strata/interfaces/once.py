"""One answer on stdout, statistics on stderr: what scripts and pipes use."""

from __future__ import annotations

from strata.core import FinishReason
from strata.interfaces.session import Session
from strata.interfaces.statistics import describe, memory_bandwidth
from strata.interfaces.terminal import Interrupt, note, write

EXIT_OK, EXIT_INTERRUPTED = 0, 130


def answer_once(session: Session, prompt: str) -> int:
    """Streams the answer; returns the exit code. ContextOverflowError comes before any output."""
    if session.remark:
        note(f"note: {session.remark}")
    answer = session.ask(prompt)
    with Interrupt().watching() as interrupt:
        for piece in answer.pieces(stop=lambda: interrupt.requested):
            write(piece)
    if not answer.text.endswith("\n"):
        write("\n")
    if answer.context_full:
        note(f"note: the context of {session.context} tokens is full; the answer ends here")
    note(describe(answer, memory_bandwidth(session.model.engine)))
    return EXIT_INTERRUPTED if answer.finish_reason is FinishReason.ABORT else EXIT_OK
