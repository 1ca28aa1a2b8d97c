"""Log lines on stderr: one for each request, with figures and never with anything of a body."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from strata.interfaces.server.page import page_files
from strata.interfaces.terminal import printable

_QUIET_PATHS = frozenset(("/health", "/metrics", "/stats", *page_files()))
"""Asked every few seconds, or by every visitor, and of no interest when all is well."""
_ERROR, _WARNING, _INFO = 3, 4, 6  # syslog's numbers; journald reads them from "<N>" before a line


def in_journal(stream: TextIO | None) -> bool:
    """Whether what is written there goes to journald (man systemd.exec, JOURNAL_STREAM)."""
    try:
        found = os.fstat((stream or sys.stderr).fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class RequestLog:
    """as_json: one JSON object a line instead of text. stream: stderr unless told otherwise.

    In the journal every line begins with its priority.
    """

    def __init__(self, *, as_json: bool = False, stream: TextIO | None = None) -> None:
        self._as_json = as_json
        self._stream = stream
        self._journal = in_journal(stream)

    def request(
        self, scope: Mapping[str, Any], status: int, seconds: float, fields: Mapping[str, Any]
    ) -> None:
        """A request that is over. seconds: until the last byte was sent."""
        if scope["path"] in _QUIET_PATHS and status < 400:
            return
        client = (scope.get("client") or ("-",))[0]
        line = {"client": client, "method": scope["method"], "path": scope["path"][:200], "status": status}
        priority = _INFO if status < 500 else _WARNING
        self._write("request", {**line, "seconds": round(seconds, 4), **fields}, priority)

    def event(self, message: str, **fields: Any) -> None:
        """Something about the server itself."""
        self._write(message, fields, _INFO)

    def warning(self, message: str) -> None:
        """Something about the server that its owner should know."""
        self._write(f"warning: {message}", {}, _WARNING)

    def fault(self, message: str) -> None:
        """Something that should not have happened."""
        self._write("error", {"detail": message}, _ERROR)

    def _write(self, message: str, fields: Mapping[str, Any], priority: int) -> None:
        stream = self._stream or sys.stderr
        if self._as_json:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"time": stamp, "message": message, **fields})
        else:
            shown = "  ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
            text = printable(f"{time.strftime('%H:%M:%S')} {message}  {shown}".rstrip())
        if self._journal:
            text = "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads the log: no reason to stop serving
