"""The chat's /commands. Each takes the session and the rest of its line."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from strata.config import KINDS, Override, load_config
from strata.errors import RequestError, UsageError
from strata.interfaces.answer import Answer
from strata.interfaces.messages import Message
from strata.interfaces.session import Session
from strata.interfaces.terminal import note, printable

_ROLES = ("system", "user", "assistant")
_MAX_SAVED_BYTES = 64 << 20
_ALIASES = {"temp": "temperature", "n": "max_tokens"}


class Leave(Exception):  # noqa: N818 - a request, not an error
    """The user wants to go."""


class Command(NamedTuple):
    """usage and help are what /help shows; run may return an answer to stream."""

    usage: str
    help: str
    run: Callable[[Session, str], Answer | None]


def run_command(session: Session, line: str) -> Answer | None:
    """Runs one line that begins with a slash; UsageError for a name that is no command."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(name.strip())
    if command is None:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{nearest[0]}? " if nearest else ""
        raise UsageError(
            f"no command /{name}", remedy=f"{hint}/help lists them; // sends a line that begins with /"
        )
    return command.run(session, rest.strip())


def _help(session: Session, rest: str) -> None:
    for command in COMMANDS.values():
        click.echo(f"  {command.usage:<22} {command.help}")
    click.echo("  Enter sends, Alt-Enter or a backslash at the end begins a new line, // sends a leading /.")
    click.echo("  Ctrl-C stops an answer, twice at the prompt leaves; Ctrl-D leaves.")


def _reset(session: Session, rest: str) -> None:
    session.reset()
    note("(new conversation)")


def _system(session: Session, rest: str) -> None:
    if rest:
        session.system = rest
        session.reset()
        note("(new conversation with this system prompt)")
    else:
        click.echo(printable(session.system) or "(no system prompt)")


def _set(session: Session, rest: str) -> None:
    key, _, value = rest.replace("=", " ", 1).partition(" ")
    key = key.replace("-", "_")
    key = _ALIASES.get(key, key)
    kinds = KINDS["sampling"]
    if not value.strip() and (not key or key in kinds):
        for shown in [key] if key else kinds:
            click.echo(f"  {shown} = {printable(kinds[shown].show(getattr(session.sampling, shown)))}")
        return
    asked = load_config(None, [Override(f"sampling.{key}", value.strip(), "/set")])
    session.sampling = dataclasses.replace(session.sampling, **{key: getattr(asked.sampling, key)})


def _stats(session: Session, rest: str) -> None:
    click.echo(session.statistics())


def _save(session: Session, rest: str) -> None:
    path = _path(rest, "/save FILE")
    data = json.dumps({"messages": session.all_messages()}, ensure_ascii=False, indent=2)
    path.write_text(data + "\n", encoding="utf-8")
    note(f"({len(session.messages)} messages saved in {path})")


def _load(session: Session, rest: str) -> None:
    path = _path(rest, "/load FILE")
    system, messages = _read_saved(path)
    session.system = system
    session.reset()
    session.messages.extend(messages)
    note(f"({len(messages)} messages loaded from {path})")


def _path(rest: str, usage: str) -> Path:
    if not rest:
        raise UsageError("no file name", remedy=usage)
    return Path(rest).expanduser()


def _read_saved(path: Path) -> tuple[str, list[Message]]:
    """System prompt and messages of a saved chat; UsageError when the file is something else."""
    with path.open("rb") as stream:
        data = stream.read(_MAX_SAVED_BYTES + 1)
    try:
        if len(data) > _MAX_SAVED_BYTES:
            raise ValueError(f"larger than {_MAX_SAVED_BYTES} bytes")
        messages = [_message(item) for item in json.loads(data)["messages"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"{path}: not a saved chat: {reason}", remedy="load what /save wrote") from None
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
    return system, messages


def _message(item: Any) -> Message:
    role, content = item["role"], item["content"]
    if role not in _ROLES or not isinstance(content, str):
        raise ValueError(f"a message with role {role!r} and {type(content).__name__} content")
    return {"role": role, "content": content}


def _regenerate(session: Session, rest: str) -> Answer:
    if not any(message["role"] == "user" for message in session.messages):
        raise RequestError("there is no message to answer again", remedy="write one first")
    return session.ask_again()


def _exit(session: Session, rest: str) -> None:
    raise Leave


COMMANDS: dict[str, Command] = {
    "help": Command("/help", "this list", _help),
    "reset": Command("/reset", "begin a new conversation", _reset),
    "system": Command("/system [TEXT]", "show or change the system prompt", _system),
    "set": Command("/set [OPTION VALUE]", "show or change a sampling option", _set),
    "stats": Command("/stats", "speed of the last answer, room in the context", _stats),
    "regen": Command("/regen", "answer the last message again", _regenerate),
    "save": Command("/save FILE", "keep the conversation", _save),
    "load": Command("/load FILE", "go on with a saved conversation", _load),
    "exit": Command("/exit", "leave", _exit),
}
