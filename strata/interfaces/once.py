"""One answer on stdout, statistics on stderr: what scripts and pipes use."""

from __future__ import annotations

import json

from strata.core import FinishReason
from strata.interfaces.answer import Answer
from strata.interfaces.session import Session
from strata.interfaces.statistics import describe, memory_bandwidth, to_json
from strata.interfaces.terminal import Interrupt, note, write

EXIT_OK, EXIT_INTERRUPTED = 0, 130


def answer_once(session: Session, prompt: str, *, as_json: bool = False) -> int:
    """Streams the answer, or prints it with its figures as JSON; returns the exit code.

    ContextOverflowError comes before any output.
    """
    if session.remark:
        note(f"note: {session.remark}")
    answer = session.ask(prompt)
    with Interrupt().watching() as interrupt:
        for piece in answer.pieces(stop=lambda: interrupt.requested):
            if not as_json:
                write(piece)
    bandwidth = memory_bandwidth(answer)
    if as_json:
        write(json.dumps(to_json(answer, bandwidth), indent=2) + "\n")
    else:
        _finish(session, answer, bandwidth)
    return EXIT_INTERRUPTED if answer.finish_reason is FinishReason.ABORT else EXIT_OK


def _finish(session: Session, answer: Answer, bandwidth: float) -> None:
    if not answer.text.endswith("\n"):
        write("\n")
    if answer.context_full:
        note(f"note: the context of {session.context} tokens is full; the answer ends here")
    note(describe(answer, bandwidth))
