"""Converts a small model and kills itself at the n-th call that touches the disk (test_resume.py).

usage: killed_convert.py OUT CALLS [SEED]; CALLS 0 never kills. Exit code 0 when the store is complete.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import small_model

from strata.store import writer
from strata.store.convert import convert

CALLS = ("open", "write", "pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir")


def counted(call: Callable[..., Any], limit: int, count: list[int]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return wrapped


def main() -> None:
    out, limit = Path(sys.argv[1]), int(sys.argv[2])
    model = small_model(seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0, layers=3)
    writer._SYNC_BYTES = 30_000  # a small model would otherwise be journalled once, at the end
    count = [0]
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name), limit, count))
    files = {"tokenizer.json": b"{}"}
    report = convert(model.source, model.spec, model.targets, model.experts, out, extra_files=files)
    print(count[0], report.resumed)


if __name__ == "__main__":
    main()
