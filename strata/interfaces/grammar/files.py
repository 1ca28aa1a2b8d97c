"""Grammars of the command line."""

from __future__ import annotations

import json
from pathlib import Path

from strata.errors import UsageError
from strata.interfaces.grammar.compiler import MAX_WRITTEN, free_grammar
from strata.interfaces.grammar.source import MAX_BYTES, Grammar


def read_grammar(json_schema: Path | None, grammar: Path | None) -> Grammar | None:
    """The grammar of the answers, from the file that was given. Raises UsageError, RequestError, OSError."""
    if json_schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar exclude each other", remedy="leave one of them out")
    if grammar is not None:
        return free_grammar(_text(grammar, MAX_WRITTEN))
    if json_schema is None:
        return None
    try:
        schema = json.loads(_text(json_schema, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{json_schema} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{json_schema} is no JSON object", remedy='write a schema, e.g. {"type": "object"}')
    return Grammar(schema=schema)


def _text(path: Path, most: int) -> str:
    if not path.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{path} is not there, or no file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at {error.start}") from None
