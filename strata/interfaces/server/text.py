"""From bodies to what the engine takes: prompts as token ids, sampling, and how the answer's text is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from strata.core import SamplingParams
from strata.errors import RequestError
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.errors import bad_request, not_supported
from strata.interfaces.server.schema import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
    Sampling,
    Strict,
    asks_for_something,
)

_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "ignore_eos"),
)


def check_parameters(body: Strict) -> list[str]:
    """The names of parameters nobody knows; raises ApiError for those that are known and not supported."""
    for name in body.unknown:
        if name in UNSUPPORTED and asks_for_something(name, (body.model_extra or {})[name]):
            raise not_supported(name)
    return [name for name in body.unknown if name not in WITHOUT_EFFECT | UNSUPPORTED]


def sampling_of(body: Sampling, defaults: SamplingParams) -> SamplingParams:
    """The configuration's sampling, with what the body says instead."""
    given = {name: getattr(body, name) for name in _OPTIONS if getattr(body, name) is not None}
    if body.repetition_penalty is not None:
        given.setdefault("repeat_penalty", body.repetition_penalty)
    if body.seed is not None:
        given["seed"] = body.seed if body.seed >= 0 else None
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))
    limit = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
    if limit is not None:
        given["max_tokens"] = limit
    return dataclasses.replace(defaults, **given)


def seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Each choice of an answer has a seed of its own: with the same one they would all be the same."""
    if sampling.seed is None or choice == 0:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + choice) % (1 << 63))


def bias_of(body: Sampling, model: LoadedModel) -> dict[int, float]:
    """logit_bias with ids as numbers. Raises ApiError for ids outside the vocabulary."""
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    known = model.engine.options.valid_tokens
    if bias and max(bias) >= known:
        message = f"logit_bias has the token id {max(bias)}, the vocabulary is 0 to {known - 1}"
        raise bad_request(message, "logit_bias")
    return bias


def chat_messages(body: ChatBody) -> list[dict[str, Any]]:
    """The messages as the client sent them, without what it left out."""
    return [message.model_dump(exclude_unset=True) for message in body.messages]


def chat_prompt(
    model: LoadedModel,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> tuple[str, list[int]]:
    """The prompt of a conversation, as text and as ids. Long ones take a while: not in the event loop."""
    model.check_length(checked("\n".join(_strings([messages, tools or []])), "messages"))
    try:
        return model.format.prompt(messages, tools=tools, **variables)
    except TypeError as error:  # chat_template_kwargs with a name that is ours
        raise RequestError(f"chat_template_kwargs: {error}") from None


def template_variables(body: ChatBody) -> dict[str, Any]:
    """What else the chat template sees."""
    variables = dict(body.chat_template_kwargs or {})
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & variables.keys()
    if reserved or not all(name.isidentifier() for name in variables):
        raise bad_request("chat_template_kwargs: a name is reserved, or no name", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables


def completion_prompts(model: LoadedModel, body: CompletionBody) -> list[list[int]]:
    """Every prompt as ids. Control tokens in a raw prompt count. Raises ApiError for an empty one."""
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and not isinstance(prompt[0] if prompt else 0, int)
    prompts = prompt if several else [prompt]
    found = [
        model.encode_text(checked(one, "prompt")) if isinstance(one, str) else list(one) for one in prompts
    ]
    if not found or not all(found):
        raise bad_request("prompt is empty: send at least one token", "prompt")
    return found


def checked(text: str, param: str) -> str:
    """The text. Raises ApiError for half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} has half a surrogate pair: U+{ord(text[error.start]):04X}", param
        ) from None
    return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
