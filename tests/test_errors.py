"""Errors of users end with what they can do."""

from __future__ import annotations

import ast
from pathlib import Path

from strata.errors import FileFormatError, IncompleteError, UsageError

SOURCES = sorted((Path(__file__).resolve().parents[1] / "strata").rglob("*.py"))
OF_USERS = {
    *("UsageError", "ConfigError", "CapacityError", "HardwareError", "UnsupportedError", "LockedError"),
    *("NumericalError", "StrataError"),
}


def without_remedy(source: str) -> list[int]:
    """Lines that make an error of a user's doing and say no remedy."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in OF_USERS
        and node.args
        and all(keyword.arg not in ("remedy", None) for keyword in node.keywords)
    ]


def test_what_a_user_did_has_a_remedy() -> None:
    found = {str(path): without_remedy(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 300 and {path: lines for path, lines in found.items() if lines} == {}


def test_lines_without_one_are_found() -> None:
    assert without_remedy('raise UsageError("a")\n\nraise ConfigError("b", remedy="c")\n') == [1]


def test_a_damaged_file_has_one_in_any_case() -> None:
    assert str(FileFormatError("x: no header")).endswith("fetch or make it again")
    assert IncompleteError("x").remedy == FileFormatError("y").remedy
    assert FileFormatError("x", remedy="wait").remedy == "wait" and UsageError("x").remedy == ""
