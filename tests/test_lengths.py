"""How long functions and files may be: docs/design.md, section 9."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


def sources(folders: Sequence[str], *endings: str) -> Iterator[tuple[Path, str]]:
    """Files of any of these folders, and their text."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix[1:] in endings:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def functions(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those defined in these statements, and inside them."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        for part in ("body", "orelse", "handlers", "finalbody"):
            yield from functions(getattr(statement, part, ()))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line, without the docstring: that of a command is its help."""
    first = function.body[0]
    assert function.end_lineno is not None and first.end_lineno is not None
    silent = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - silent


def test_files_have_at_most_400_lines() -> None:
    found = sources(("strata", "csrc", "scripts", "tests"), "py", "cpp", "h", "cu", "cuh")
    lengths = {str(path): len(text.splitlines()) for path, text in found}
    assert len(lengths) > 900
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_functions_have_at_most_60_lines() -> None:
    lengths = {}
    for path, text in sources(("strata", "scripts"), "py"):
        for one in functions(ast.parse(text).body):
            lengths[f"{path}:{one.lineno} {one.name}"] = lines_of(one)
    assert len(lengths) > 3000
    assert {place: lines for place, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}
