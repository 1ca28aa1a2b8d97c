"""What was given and would change nothing is an error, by name: a user expects that it did something."""

from __future__ import annotations

from collections.abc import Container, Iterator

import click
from click.core import ParameterSource

from strata.errors import UsageError


def given() -> Iterator[tuple[str, str]]:
    """The parameters of this command line: their name in the command's function, and what users call them."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            argument = isinstance(parameter, click.Argument)
            yield name, "MODEL" if argument else max(parameter.opts, key=len)


def refuse_idle(idle: Container[str], reason: str, remedy: str) -> None:
    """UsageError where one of `idle`, names in the function, was given. reason: follows its users' name."""
    for name, word in given():
        if name in idle:
            raise UsageError(f"{word} {reason}", remedy=remedy)
