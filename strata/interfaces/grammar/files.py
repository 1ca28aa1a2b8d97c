"""Grammars of the command line."""

from __future__ import annotations

from pathlib import Path

from strata.errors import UsageError
from strata.interfaces.grammar.compiler import MAX_WRITTEN, free_grammar
from strata.interfaces.grammar.source import MAX_BYTES, Grammar
from strata.interfaces.strict_json import JsonError, read_json

_SCHEMA = 'write a schema, e.g. {"type": "object"}'


def read_grammar(json_schema: Path | None, grammar: Path | None) -> Grammar | None:
    """The grammar of the answers, from the file that was given. Raises UsageError, RequestError, OSError."""
    if json_schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar exclude each other", remedy="leave one of them out")
    if grammar is not None:
        return free_grammar(_text(grammar, MAX_WRITTEN))
    if json_schema is None:
        return None
    try:
        schema = read_json(_text(json_schema, MAX_BYTES))
    except JsonError as error:
        raise UsageError(f"{json_schema} is not JSON: {error}", remedy=_SCHEMA) from None
    if not isinstance(schema, dict):
        raise UsageError(f"{json_schema} is no JSON object", remedy=_SCHEMA)
    return Grammar(schema=schema)


def _text(path: Path, most: int) -> str:
    if not path.is_file():  # opening a pipe would wait for a writer
        raise UsageError(f"{path} is not there, or no file", remedy="check the path")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:  # before decoding: it may be cut inside a character
        size = max(path.stat().st_size, len(data))
        raise UsageError(f"{path} has {size} bytes, {most} are allowed", remedy="simplify it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: {error.reason} at {error.start}", remedy="save it as UTF-8"
        ) from None
