"""`strata run`: one answer, or a chat on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from strata.config import Config, Override, load_config
from strata.errors import UsageError
from strata.interfaces.commands.effects import refuse_idle
from strata.interfaces.commands.recording_options import record_trace_option, timeline_option
from strata.interfaces.commands.speculation_flags import FLAGS, no_draft_option, off, origin

if TYPE_CHECKING:
    from strata.interfaces.session import Session

# Flags are llama.cpp's; each stands for an option of the configuration, which checks its value.
_FLAGS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("-m", "--model"), "model.path", "PATH", "Store, GGUF file, Hugging Face directory, demo or smollm2."),
    (("-c", "--context", "--ctx-size"), "model.context", "N", "Tokens of prompt and answer together."),
    (("-t", "--threads"), "backend.threads", "N", "Threads that compute."),
    (("--temp", "--temperature"), "sampling.temperature", "X", "Temperature; 0 takes the likeliest token."),
    (("--top-k",), "sampling.top_k", "N", "Keep the N likeliest tokens; 0 keeps all."),
    (("--top-p",), "sampling.top_p", "X", "Keep the likeliest tokens that make up X; 1 keeps all."),
    (("--min-p",), "sampling.min_p", "X", "Drop tokens less likely than X times the likeliest."),
    (("--repeat-penalty",), "sampling.repeat_penalty", "X", "Penalty of recent tokens; 1 is none."),
    (("--repeat-last-n",), "sampling.repeat_last_n", "N", "How far it looks back; -1 is the whole context."),
    (("--presence-penalty",), "sampling.presence_penalty", "X", "Penalty of tokens that occurred."),
    (("--frequency-penalty",), "sampling.frequency_penalty", "X", "The same for every occurrence."),
    (("-s", "--seed"), "sampling.seed", "N", "The same seed gives the same text; -1 is random."),
    (
        ("-n", "--max-tokens", "--predict"),
        "sampling.max_tokens",
        "N",
        "Tokens of an answer; -1 is unlimited.",
    ),
    (("--stop",), "sampling.stop", "TEXT", "End the answer before this text (repeatable)."),
    (("--system",), "chat.system", "TEXT", "System prompt."),
    (("--chat-template",), "chat.template", "FILE", "Jinja file instead of the model's own template."),
    *FLAGS,
)


def _add_flags(function: Callable[..., int]) -> Callable[..., int]:
    for names, option, metavar, text in reversed(_FLAGS):
        several = option == "sampling.stop"
        function = click.option(
            *names, option.replace(".", "__"), metavar=metavar, help=text, multiple=several
        )(function)
    return function


@click.command("run")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--config", "config_file", metavar="FILE", help="Configuration, see configs/default.yaml.")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this once and exit; standard input is not read.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option(
    "--json-schema", type=click.Path(path_type=Path), metavar="FILE", help="Answers are JSON of this schema."
)
@click.option(
    "--grammar", type=click.Path(path_type=Path), metavar="FILE", help="Answers follow this GBNF or Lark."
)
@click.option("--json", "as_json", is_flag=True, help="One answer with its figures as JSON.")
@click.option("--serve", is_flag=True, help="Answer over HTTP instead, as `strata serve` does.")
@no_draft_option
@timeline_option
@record_trace_option
@click.option("--show-config", is_flag=True, help="Print every option with its origin and exit.")
@_add_flags
def command(
    model: str | None,
    config_file: str | None,
    settings: tuple[str, ...],
    prompt: str | None,
    raw: bool,
    ignore_eos: bool,
    json_schema: Path | None,
    grammar: Path | None,
    as_json: bool,
    serve: bool,
    no_draft: bool,
    timeline: Path | None,
    record_trace: Path | None,
    show_config: bool,
    **flags: Any,
) -> int:
    """Chat with a model, or answer one prompt.

    On a terminal this opens a chat. With --prompt, or when standard input is not a terminal, there is one
    answer on standard output and statistics on standard error. Piped input is one prompt, however many
    lines it has; empty input is no prompt and nothing is loaded.

    \b
    Examples:
      strata run --config configs/demo.yaml
      strata run smollm2 --temp 0 --prompt "Why is the sky blue?"
      strata run demo --prompt "Hello" --timeline hello.json
      strata run smollm2 --prompt "A cat as JSON." --json-schema cat.schema.json
      git diff | strata run --config configs/smollm2.yaml --system "Summarise this change."
    """
    if model is not None and flags["model__path"] is not None:
        raise UsageError(f"two models: {model} and --model {flags['model__path']}", remedy="name one")
    overrides = [Override.parse(item) for item in settings] + _overrides(flags) + off(no_draft)
    overrides += [Override("model.path", model, "MODEL")] if model is not None else []
    if ignore_eos:
        overrides.append(Override("sampling.ignore_eos", "true", "--ignore-eos"))
    if serve:
        if prompt is not None or raw or as_json or json_schema or grammar:
            raise UsageError(
                "--serve does not go with --prompt, --raw, --json, --json-schema or --grammar",
                remedy="leave one of them out",
            )
        refuse_idle(("chat__system",), "has no effect with --serve", "requests bring their system prompt")
        from strata.interfaces.commands.serve import start

        return start(config_file, overrides, show_config, timeline, record_trace)
    if raw:
        templated = ("chat__system", "chat__template")
        refuse_idle(templated, "has no effect with --raw, which uses no template", "leave one of them out")
    config = load_config(config_file, overrides)
    if show_config:
        click.echo(config.show())
        return 0
    form = _Form(raw, as_json, json_schema, grammar)
    return _run(config, _single_prompt(prompt), form, timeline, record_trace)


def _overrides(flags: dict[str, Any]) -> list[Override]:
    """The flags that were given, as options of the configuration."""
    found = []
    for names, option, _, _ in _FLAGS:
        given = flags[option.replace(".", "__")]
        for text in given if isinstance(given, tuple) else (given,):
            if text is not None:
                found.append(Override(option, text, origin(names)))
    return found


def _single_prompt(prompt: str | None) -> str | None:
    """The prompt that is answered once, or None for a chat."""
    from strata.interfaces.terminal import read_stdin, valid_text

    if prompt is not None:
        if not prompt.strip():
            raise UsageError("--prompt is empty", remedy="write a question, or leave --prompt out to chat")
        return valid_text(prompt)[0]
    return None if sys.stdin is not None and sys.stdin.isatty() else read_stdin()


class _Form(NamedTuple):
    """What prompts and answers look like."""

    raw: bool
    as_json: bool
    json_schema: Path | None
    grammar: Path | None


def _run(config: Config, prompt: str | None, form: _Form, timeline: Path | None, trace: Path | None) -> int:
    if prompt is not None and not prompt.strip():
        return 0  # case-45: end of input is a reason to leave, not a message
    if prompt is None and form.as_json:
        raise UsageError("--json is for one answer, not for a chat", remedy="add --prompt")
    if not config.model.path:
        raise UsageError("no model is given", remedy="--config configs/demo.yaml, or --model PATH")
    from strata.interfaces.hardware import remembered_machine, with_device
    from strata.interfaces.models import open_model
    from strata.interfaces.recording import Files, recording
    from strata.interfaces.session import Session
    from strata.interfaces.start import announce

    grammar = None
    if form.json_schema is not None or form.grammar is not None:
        from strata.interfaces.grammar.files import read_grammar

        grammar = read_grammar(form.json_schema, form.grammar)
    machine = with_device(remembered_machine(), config)
    model = open_model(config, machine)
    if not form.as_json:
        announce(model.plan, machine, model.kv_place, model.numa_place, model.quality, model.inputs)
    session = Session(model, config, raw=form.raw, grammar=grammar)
    with recording(model.engine, model.plan, Files(timeline, trace)):
        return _talk(session, config, prompt, form.as_json)


def _talk(session: Session, config: Config, prompt: str | None, as_json: bool) -> int:
    if prompt is not None:
        from strata.interfaces.once import answer_once

        return answer_once(session, prompt, as_json=as_json)
    from strata.interfaces.chat import chat
    from strata.interfaces.line_reader import history_path, make_reader

    return chat(session, make_reader(history_path(config.chat.history)))
