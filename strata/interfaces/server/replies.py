"""What the server answers, for /openapi.json. Tests hold every real answer against these."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """No other keys."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptDetails(Reply):
    """cached_tokens: found in the KV cache, not computed again."""

    cached_tokens: int


class Usage(Reply):
    """Token counts; every prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Reply):
    """bytes: a token may be half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the answer and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Of all tokens, those of reasoning and tool calls included."""

    content: list[ContentLogprob]


class FunctionCall(Reply):
    """arguments: JSON text as the model wrote it; it may be wrong."""

    name: str
    arguments: str


class Call(Reply):
    """A call of a function that the client offered."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Reply):
    """content: null where there are tool calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(Reply):
    """POST /v1/chat/completions without stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Reply):
    """name comes once, arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Reply):
    """A piece of a call; id, type and name come with the first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(Reply):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Reply):
    """News of one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Reply):
    """An event of a streamed chat completion. choices is empty in the one with the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class TextLogprobs(Reply):
    """Four lists of one length. null: the first token of a text, of which nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Reply):
    """One answer, or news of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextReply(Reply):
    """POST /v1/completions, and the events of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Reply):
    """max_model_len: tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Reply):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Piece(Reply):
    """A token and its text."""

    id: int
    piece: str


class TokenizeReply(Reply):
    """POST /tokenize. tokens: ids, or with `with_pieces` ids with their texts."""

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int


class DetokenizeReply(Reply):
    """POST /detokenize: the same text under llama.cpp's name and vLLM's."""

    content: str
    prompt: str


class Loading(Reply):
    """done: the share of the stage, 0 to 1, where it is known."""

    stage: str
    done: float | None


class Health(Reply):
    """GET /health; status 200 with "ok" only, else 503."""

    status: Literal["ok", "loading", "degraded", "dead", "stopped", "draining"]
    model: str | None
    loading: Loading | None
    requests_running: int
    requests_waiting: int
    seconds_since_progress: float | None


class StatsRequests(Reply):
    """most_running: how many take part in a step at most; queue: how many may wait."""

    running: int
    waiting: int
    most_running: int | None
    queue: int


class StatsTokens(Reply):
    """Since the start. Seconds are those of steps, shared among their tokens."""

    steps: int
    prefill: int
    prefill_seconds: float
    decode: int
    decode_seconds: float


class StatsRegion(Reply):
    """Bytes. kept: free, but of use to prompts that begin as earlier ones did. peak: the most that were ever
    used, where that is known."""

    tier: Literal["device", "host"]
    name: str
    used: int
    kept: int
    total: int
    peak: int


class StatsExperts(Reply):
    """layers: those with experts, `count` each. heat: by layer, two hexadecimal digits per expert, of what
    was routed to lately. layer_hits, layer_misses: of decode, [] without an expert cache. hits ... computed:
    how experts were answered since the start, 0 without a device."""

    layers: list[int]
    count: int
    heat: list[str]
    layer_hits: list[int]
    layer_misses: list[int]
    hits: int
    late: int
    fetched: int
    streamed: int
    computed: int


class Stats(Reply):
    """GET /stats. now: a clock in seconds; two answers make a rate. null: there is no model yet."""

    now: float
    status: Literal["ok", "loading", "degraded", "dead", "stopped", "draining"]
    model: str | None
    loading: Loading | None
    context: int | None
    requests: StatsRequests
    tokens: StatsTokens | None
    regions: list[StatsRegion]
    experts: StatsExperts | None
