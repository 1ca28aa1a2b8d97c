"""Bodies and replies of /v1/messages. Types are strict; unknown keys are let through and reported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from strata.interfaces.server.replies import Reply
from strata.interfaces.server.schema import MAX_STOPS, StopText, Strict

_LARGEST = (1 << 31) - 1


class Block(Strict):
    """Text, thinking, a tool_use (id, name, input) or a tool_result (tool_use_id, content, is_error)."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class InputMessage(Strict):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessagesTool(Strict):
    """A function; input_schema: of its arguments, which strict holds to it. Only custom tools."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(Strict):
    """any: some tool; tool: the one of that name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Strict):
    """What the chat template is told, where it can switch reasoning; budget_tokens: the most it may take."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=_LARGEST)


class CountBody(Strict):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=_LARGEST)
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_LARGEST)
    metadata: dict[str, Any] | None = None


class MessagesUsage(Reply):
    """input_tokens: those that were computed; the others were found in the KV cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnswerBlock(Reply):
    """text, thinking (with an empty signature) or tool_use."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["text", "thinking", "tool_use"]


class MessageReply(Reply):
    """POST /v1/messages without stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountReply(Reply):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorBody(Reply):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorReply(Reply):
    """What every answer with a status of 400 or more holds."""

    type: Literal["error"]
    error: MessagesErrorBody
