"""Flags of speculative decoding, llama.cpp's where it has them; `run` and `serve` take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from strata.config import Override
from strata.errors import UsageError
from strata.interfaces.commands.effects import refuse_idle

DRAFTERS = ("-md", "--model-draft", "--draft-model")
FLAGS = (
    (DRAFTERS, "speculative.draft", "PATH", "Small model that proposes, or MTP layer."),
    (("--draft", "--draft-max", "--draft-n"), "speculative.most", "N", "Tokens of a draft, at most [16]."),
)


def origin(names: Sequence[str]) -> str:
    """What messages call a flag: its longest name, but --draft, which the documentation has, as that."""
    return "--draft" if "--draft" in names else max(names, key=len)


def no_draft_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--no-draft`."""
    return click.option("--no-draft", is_flag=True, help="A token per step, no speculative decoding.")(
        function
    )


def off(given: bool) -> list[Override]:
    """What the flag says. UsageError for flags that leave each other no effect."""
    if given:
        idle = [option.replace(".", "__") for _, option, _, _ in FLAGS]
        refuse_idle(idle, "has no effect with --no-draft", "leave one of them out")
    flags = click.get_current_context().params
    if flags.get("speculative__most") == "0" and flags.get("speculative__draft"):
        raise UsageError("--model-draft has no effect with --draft 0", remedy="leave one of them out")
    return [Override("speculative.use", "off", "--no-draft")] if given else []
