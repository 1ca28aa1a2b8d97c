"""`strata serve`: the OpenAI-compatible service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from strata.config import Config, Override, load_config
from strata.errors import UsageError
from strata.interfaces.commands.recording_options import record_trace_option, timeline_option
from strata.interfaces.commands.speculation_flags import FLAGS, no_draft_option, off, origin

_FLAGS = (
    (("-m", "--model"), "model.path", "PATH", "Store, GGUF file, Hugging Face directory, demo or smollm2."),
    (("-c", "--context", "--ctx-size"), "model.context", "N", "Tokens of prompt and answer together."),
    (("-t", "--threads"), "backend.threads", "N", "Threads that compute."),
    (("--host",), "server.host", "ADDRESS", "Where to listen [127.0.0.1]."),
    (("--port",), "server.port", "N", "TCP port [8080]; 0 takes a free one."),
    (("--api-key-file",), "server.api_key_file", "FILE", "API keys, one a line."),
    (("-a", "--alias"), "server.model_name", "NAME", "The model's name for clients."),
    (("-np", "--parallel"), "engine.requests", "N", "Requests that may fill the context at once [4]."),
    *FLAGS,
)
PARALLEL = 4
"""Contexts that the KV cache holds, unless told otherwise: with one, a request keeps all others waiting."""


def _flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorators add options from the last to the first."""
    for names, option, metavar, text in reversed(_FLAGS):
        add = click.option(*names, option.replace(".", "__"), metavar=metavar, help=text)
        function = add(function)
    return function


@click.command("serve", short_help="Serve a model over HTTP, as OpenAI does.")
@click.argument("model", required=False, metavar="[MODEL]")
@_flags
@click.option("--config", "config_file", metavar="FILE", help="Configuration, see configs/default.yaml.")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@no_draft_option
@timeline_option
@record_trace_option
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
@click.option("--show-config", is_flag=True, help="Print every option with its origin and exit.")
def command(
    model: str | None,
    config_file: str | None,
    settings: tuple[str, ...],
    no_draft: bool,
    timeline: Path | None,
    record_trace: Path | None,
    log_json: bool,
    show_config: bool,
    **flags: str | None,
) -> int:
    """Serve a model over HTTP as OpenAI does: /v1/chat/completions, /v1/completions and more.

    Listens on this machine only unless told otherwise. SIGTERM or Ctrl-C lets running answers end; a second
    one does not. The variable STRATA_API_KEY sets an API key.

    \b
    Examples:
      strata serve --config configs/demo.yaml
      strata serve smollm2 --port 8000
      STRATA_API_KEY=secret strata serve ~/stores/qwen3-30b --host 0.0.0.0 --log-json
    """
    if model is not None and flags["model__path"] is not None:
        raise UsageError(f"two models: {model} and --model {flags['model__path']}", remedy="name one")
    overrides = [Override.parse(item) for item in settings] + off(no_draft)
    overrides += [
        Override(option, text, origin(names))
        for names, option, _, _ in _FLAGS
        if (text := flags[option.replace(".", "__")]) is not None
    ]
    overrides += [Override("model.path", model, "MODEL")] if model is not None else []
    overrides += [Override("server.log", "json", "--log-json")] if log_json else []
    return start(config_file, overrides, show_config, timeline, record_trace)


def start(
    config_file: str | None,
    overrides: list[Override],
    show_config: bool,
    timeline: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Serve until a signal ends it; the exit code. timeline, trace: written meanwhile."""
    config = serving_config(config_file, overrides)
    if show_config:
        click.echo(config.show())
        return 0
    if not config.model.path:
        raise UsageError("no model is given", remedy="--config configs/demo.yaml, or --model PATH")
    from strata.interfaces.recording import Files
    from strata.interfaces.server.serving import serve

    return serve(config, Files(timeline, trace))


def serving_config(config_file: str | None, overrides: list[Override]) -> Config:
    """The configuration; a server answers several at once where nobody said how many."""
    config = load_config(config_file, overrides)
    if config.where("engine.requests") == "default":
        config = load_config(
            config_file, [*overrides, Override("engine.requests", str(PARALLEL), "strata serve")]
        )
    return config
