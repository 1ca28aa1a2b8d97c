"""POST /tokenize and /detokenize, in llama.cpp's and vLLM's shapes."""

from __future__ import annotations

from typing import Any

from strata.interfaces.models import LoadedModel
from strata.interfaces.server.errors import bad_request
from strata.interfaces.server.logprobs import token_text
from strata.interfaces.server.schema import DetokenizeBody, TokenizeBody
from strata.interfaces.server.service import Service
from strata.interfaces.server.text import chat_prompt, check_parameters, checked


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Ids of a text or a conversation. Raises ApiError unless exactly one of them is given."""
    check_parameters(body)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request("give one of content, prompt and messages", given[1] if given else "content")
    model = service.model
    ids = await service.in_thread(given[0], _ids, model, body)
    pieces = [{"id": index, "piece": token_text(model.tokenizer, index)} for index in ids]
    return {
        "tokens": pieces if body.with_pieces else ids,
        "count": len(ids),
        "max_model_len": model.context,
    }


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """The text of ids, control tokens included. Raises ApiError for ids outside the vocabulary."""
    check_parameters(body)
    model = service.model
    last = model.tokenizer.vocab_size - 1
    if body.tokens and max(body.tokens) > last:
        raise bad_request(f"tokens has the id {max(body.tokens)}, the vocabulary is 0 to {last}", "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special=False)
    return {"content": text, "prompt": text}


def _ids(model: LoadedModel, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
        variables = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.add_generation_prompt}
        return chat_prompt(model, messages, tools or None, variables)[1]
    text = body.content if body.content is not None else body.prompt or ""
    model.check_length(checked(text, "content" if body.content is not None else "prompt"))
    special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if special and body.parse_special:
        return model.tokenizer.encode_completion(text)
    ids = model.tokenizer.encode(text, special=body.parse_special)
    bos = model.tokenizer.bos_id
    return [bos, *ids] if special and model.tokenizer.add_bos and bos is not None else ids
