"""The bodies that clients send. Unknown keys are let through and reported (`ignored`), see docs/server.md.

Types are strict: a number in quotes or a bool for a number is a mistake. null stands for "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator, model_validator

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20

StopText = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
TokenId = Annotated[StrictInt, Field(ge=0, le=(1 << 31) - 1)]
_LARGEST = (1 << 31) - 1


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Parameters of OpenAI, llama.cpp and vLLM that would change the answer and that nothing here obeys: refused.
UNSUPPORTED = _words(
    "audio continue_final_message dry_multiplier dynatemp_range function_call functions "
    "guided_whitespace_pattern length_penalty min_tokens mirostat n_probs "
    "prediction bad_words allowed_token_ids samplers suffix truncate_prompt_tokens "
    "typ_p typical_p use_beam_search web_search_options xtc_probability"
)
# Values of those that ask for nothing.
_NEUTRAL_ONE = frozenset(("length_penalty", "typ_p", "typical_p"))
# Known, and without any effect on the answer of a server like this one.
WITHOUT_EFFECT = _words(
    "metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier "
    "store user verbosity cache_prompt skip_special_tokens spaces_between_special_tokens "
    "request_id guided_decoding_backend"
)


def asks_for_something(name: str, value: Any) -> bool:
    """Whether an unsupported parameter would change anything; clients send neutral values, too."""
    return bool(value) and not (name in _NEUTRAL_ONE and value == 1)


class Strict(BaseModel):
    """Strict types, unknown keys kept aside."""

    model_config = ConfigDict(strict=True, extra="allow")

    @property
    def unknown(self) -> list[str]:
        """Keys with a value that no field stands for."""
        return [key for key, value in (self.model_extra or {}).items() if value is not None]


class StreamOptions(Strict):
    """include_usage: one more chunk with the token counts before the end."""

    include_usage: bool | None = None


class JsonSchemaFormat(Strict):
    """strict false: what grammars cannot express of the schema is left out."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """text, json_object or json_schema. schema: llama.cpp's, beside json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("json_schema is missing")
        return self


class StructuredOutputs(Strict):
    """vLLM's way to ask for a grammar."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Strict):
    """What both kinds of completion have in common; what is not given comes from the configuration.

    Of the grammars, at most one. grammar, guided_grammar: GBNF or Lark.
    """

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_LARGEST)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repeat_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    repeat_last_n: int | None = Field(None, ge=-1, le=_LARGEST)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, le=_LARGEST)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-_LARGEST, le=_LARGEST)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10) or not -100 <= bias <= 100:
                raise ValueError("maps token ids to numbers from -100 to 100")
        return value

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1


class ContentPart(Strict):
    """A part of a message. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Strict):
    """name, and arguments as JSON text (an object is taken, too)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolFunction(Strict):
    """A function that the model may call; parameters: its JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Only functions."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    """The function that must be called."""

    name: str


class ToolChoice(Strict):
    """Asks for one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=_LARGEST)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(Sampling):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | Annotated[list[TokenId], Field(min_length=1)] | list[str] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)


class TokenizeBody(Strict):
    """POST /tokenize: `content` (llama.cpp), `prompt` or `messages` (vLLM).

    add_special: BOS, by the tokenizer's rule. parse_special: control tokens in the text count as such.
    """

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_special: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Strict):
    """POST /detokenize."""

    tokens: list[TokenId]
