"""The `strata` command. This module and the command modules import nothing heavy: `strata --help` must
answer in less than 0.3 s, so numpy, torch, rich and the rest are imported when a command runs."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import click

from strata import __version__
from strata.errors import StrataError
from strata.interfaces.empty_values import refuse_empty
from strata.interfaces.terminal import os_error_text, printable

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE = 141  # 128 + SIGPIPE

_COMMANDS = (
    "run",
    "serve",
    "service",
    "convert",
    "calibrate",
    "inspect",
    "plan",
    "simulate",
    "verify",
    "doctor",
    "bench",
    "eval",
    "trace",
)


class LazyGroup(click.Group):
    """Imports a command's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The order in which `--help` lists them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None when there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"strata.interfaces.commands.{cmd_name}")
        command: click.Command = module.command
        _add_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """click's, with the nearest command where there is none of that name. Raises UsageError for options
        with an empty value."""
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            nearest = get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        refuse_empty(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Runs the command; a reader that left (`| head -1`) ends it quietly. click would say exit code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(EXIT_PIPE)


_DEBUG_HELP = "Show the traceback of an error."


def _add_debug(command: click.Command) -> None:
    """--debug may stand anywhere in a command line."""
    if all(parameter.name != "debug" for parameter in command.params):
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help=_DEBUG_HELP))
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        _add_debug(part)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="strata %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help=_DEBUG_HELP)
def strata() -> None:
    """Run mixture-of-experts language models that are larger than the graphics card.

    \b
    Try:  strata run --config configs/demo.yaml --prompt "What is the capital of France?"
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs the command and exits with its code; no traceback without --debug."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    code = run(arguments, debug="--debug" in arguments)
    try:
        sys.stdout.flush()  # at exit it would be too late for an exit code of ours
    except OSError as error:
        _silence_stdout()
        code = code or (EXIT_PIPE if isinstance(error, BrokenPipeError) else _report(error, debug=False))
    sys.exit(code)


def _open_closed_streams() -> None:
    """Services may start with stdout or stderr closed: what goes there is lost, the answer need not be."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """The exit code of a command line: 0 done, 1 failure, 2 usage, 130 interrupted, 141 reader gone."""
    try:
        warnings.showwarning = _show_warning
        code = strata.main(args=list(arguments), prog_name="strata", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK  # commands return their exit code or None
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_PIPE
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except click.exceptions.Exit as request:
        return request.exit_code
    except Exception as error:
        return _report(error, debug, arguments)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Warnings are for people here: the sentence, without Python's file and line."""
    click.echo(f"warning: {printable(str(message))}", err=True)


def _report(error: Exception, debug: bool, arguments: Sequence[str] = ()) -> int:
    """Prints what went wrong with these arguments and returns the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        error.show()
        if not isinstance(error, click.UsageError):
            return error.exit_code
        _show_hint(arguments)
        return EXIT_USAGE
    if isinstance(error, StrataError):
        message, code = str(error), error.exit_code
    elif isinstance(error, OSError):
        message, code = os_error_text(error), EXIT_FAILURE
    elif isinstance(error, MemoryError):
        message, code = "not enough memory\n  remedy: a smaller model.context or kv.size", EXIT_FAILURE
    else:
        message = (
            f"internal error: {type(error).__name__}: {error}\n  remedy: report it with --debug's output"
        )
        code = EXIT_FAILURE
    click.echo(f"error: {printable(message)}", err=True)
    return code


def _show_hint(arguments: Sequence[str]) -> None:
    """click reads `-ngl 99` as `-n gl` and complains about the 99: name the flag that was meant."""
    from strata.interfaces.foreign_flags import hint

    if text := hint(arguments):
        click.echo(f"  remedy: {text}", err=True)


def _silence_stdout() -> None:
    """Python flushes stdout at exit and would complain about the reader that left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
