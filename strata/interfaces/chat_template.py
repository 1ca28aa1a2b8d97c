"""From a conversation to a prompt: the model's chat template, fed and fenced.

Templates differ in what they accept. Instead of a list of known models, a template is tried once with small
made-up conversations (`_CallProbe`, `_text_style`), and messages are then given in the shape that worked.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta

from strata.errors import TemplateError
from strata.interfaces import messages as shapes
from strata.interfaces.control_tokens import ControlTokens, Piece
from strata.interfaces.messages import ABSENT, CallStyle, Message
from strata.interfaces.sandbox import LimitError, Limits, TemplateEnvironment
from strata.interfaces.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_SOURCE = 2**20  # characters; the longest template of a published model has about 40,000
_OTHER_TEMPLATE = "name another in the config (chat.template)"


class ChatTemplate:
    """One jinja2 template. Safe to use from several threads.

    special_tokens: `bos_token` and the like, seen by the template. now: the clock of `strftime_now`.
    Raises TemplateError when the source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"the chat template has {len(source)} characters; {MAX_SOURCE} are allowed",
                remedy=_OTHER_TEMPLATE,
            )
        self.source = source
        self._special = dict(special_tokens or {})
        self._environment = TemplateEnvironment(limits or Limits(), now)
        self._now = now
        self._environment.start()
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            self._unknown = jinja2.meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has an error in line {error.lineno}: {error.message}",
                remedy=_OTHER_TEMPLATE,
            ) from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            cause = f"the chat template cannot be read: {error}"
            raise TemplateError(cause, remedy=_OTHER_TEMPLATE) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text. messages, tools: OpenAI's shape. Raises TemplateError or RequestError."""
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        return self._prepared(messages, tools, given)[0]

    def pieces(
        self,
        controls: ControlTokens,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, list[Piece]]:
        """The prompt's text, and the same cut so that control tokens typed by people can be told apart."""
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        text, *inputs = self._prepared(messages, tools, given)
        marked = controls.mark(inputs)
        if marked == inputs:
            return text, [Piece(text, plain=False)]
        return controls.split_prompt(text, self._run(*marked))

    def _prepared(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: dict[str, Any]
    ) -> tuple[str, list[Message], Any, dict[str, Any]]:
        """The text and the inputs that gave it. Later variants are only tried when the template refuses."""
        clean = shapes.normalised(messages, knows_developer="developer" in self.source)
        if any("tool_calls" in message for message in clean):
            clean = shapes.in_style(clean, self._call_style)
        first_error: TemplateError | None = None
        for variant, described in self._variants(clean, list(tools) if tools else None):
            inputs = (self._in_text_style(variant), described, variables)
            try:
                return self._run(*inputs), *inputs
            except LimitError:
                raise
            except TemplateError as error:
                first_error = first_error or error
        assert first_error is not None  # the first variant always exists
        raise first_error

    def _variants(self, messages: list[Message], given: Any) -> Iterator[tuple[list[Message], Any]]:
        tools: Any = given or self._text_style[1]
        yield messages, tools
        if any(message["role"] == "system" for message in messages):
            yield shapes.system_merged(messages), tools
        if tools:
            yield messages, shapes.tools_described(tools)

    def _in_text_style(self, messages: list[Message]) -> list[Message]:
        return shapes.in_parts(messages) if self._text_style[0] else messages

    @cached_property
    def _text_style(self) -> tuple[bool, list[Any] | None]:
        """Whether content must come in parts, and what stands for "no tools"."""
        probe: list[Message] = [{"role": "user", "content": "probe text"}]
        nothing: tuple[list[Any] | None, ...] = (None, [])
        for tools in nothing:
            for parts in (False, True):
                text = self._try(shapes.in_parts(probe) if parts else probe, tools)
                if text is not None and "probe text" in text:
                    return parts, tools
        return False, None

    @cached_property
    def _call_style(self) -> CallStyle:
        return _CallProbe(self._try).style()

    def _try(self, messages: list[Message], tools: Any) -> str | None:
        try:
            return self._run(messages, tools, {"add_generation_prompt": True})
        except LimitError:
            raise  # each further try would take as long
        except TemplateError:
            return None

    def _run(self, messages: list[Message], tools: Any, variables: Mapping[str, Any]) -> str:
        """Render inputs as they are; a copy, because templates may append to lists."""
        known = {"messages": messages, "tools": tools, "documents": None, **variables}
        values = {**self._special, **self._fallbacks(tools), **copy.deepcopy(known)}
        self._environment.start()
        try:
            return self._template.render(values)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the conversation: {error.message}") from error
        except Exception as error:  # whatever a stranger's template can do wrong
            text = f"the chat template failed: {type(error).__name__}: {error}"
            raise TemplateError(text, remedy=_OTHER_TEMPLATE) from error

    def _fallbacks(self, tools: Any) -> dict[str, Any]:
        """Variables that a few templates read without being given them anywhere."""
        values = {
            "functions": json.dumps([tool.get("function", tool) for tool in tools or []]),
            "datetime": self._now().strftime("%B %d %Y %H:%M:%S"),
        }
        return {name: value for name, value in values.items() if name in self._unknown}


class _CallProbe:
    """Finds out how a template wants tool calls by showing it one of each kind."""

    def __init__(self, attempt: Callable[[list[Message], Any], str | None]) -> None:
        self._attempt = attempt
        parameter = {"type": "string", "description": "key"}
        schema = {"type": "object", "properties": {"probe_key": parameter}, "required": ["probe_key"]}
        function = {"name": "probe_tool", "description": "tool", "parameters": schema}
        self._tools = [{"type": "function", "function": function}]

    def style(self) -> CallStyle:
        """The first style that writes name and arguments as JSON without a stray None.

        A template that knows no tools still gets the content that leaves no trace.
        """
        contents = (None, "", ABSENT)
        for short_ids in (False, True):
            for mapping in (True, False):
                for content in contents:
                    style = CallStyle(content, mapping, short_ids)
                    if "probe_value" in self._rendered(style):
                        return style
        return next((s for s in map(CallStyle, contents) if self._rendered(s)), CallStyle())

    def _rendered(self, style: CallStyle) -> str:
        """The conversation in this style; empty where the template fails or writes something silly."""
        text = self._attempt(self._conversation(style, None), self._tools) or ""
        spoken = self._attempt(self._conversation(style, "words"), self._tools) or ""
        if any(fault in text for fault in ("'probe_value'", '\\"probe_value')):
            return ""  # a Python repr, or JSON inside JSON
        if any(text.count(nothing) > spoken.count(nothing) for nothing in ("None", "null")):
            return ""
        return text

    def _conversation(self, style: CallStyle, content: str | None) -> list[Message]:
        call = {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}}
        calls = [{"id": "call_probe", "type": "function", "function": call}]
        result = {"role": "tool", "tool_call_id": "call_probe", "name": "probe_tool", "content": "result"}
        messages: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": content, "tool_calls": calls},
            result,
        ]
        return shapes.in_style(messages, style)


class ChatFormat:
    """A tokenizer with its chat templates: conversations in, token ids out.

    note: something the user should be told, or "". override: the source of a template to use instead.
    """

    def __init__(self, tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.note = ""
        sources = {"default": override} if override is not None else tokenizer.chat_templates
        if not sources:
            sources = {"default": CHATML}
            self.note = "the model has no chat template: using ChatML, which it may not have been trained on"
        self._templates = {
            name: ChatTemplate(source, special_tokens=tokenizer.special_tokens)
            for name, source in sources.items()
            if name in ("default", "tool_use") or len(sources) == 1
        }
        if not self._templates:
            raise TemplateError(
                f"no chat template is called default; there are {', '.join(sources)}", remedy=_OTHER_TEMPLATE
            )

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the prompt, with one BOS where there should be one; typed control tokens stay text."""
        return self.prompt(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)[1]

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, list[int]]:
        """The prompt as text and as token ids."""
        text, pieces = self._template(tools).pieces(
            self._tokenizer.controls,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return text, self._tokenizer.encode_chat(pieces)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt as text."""
        return self._template(tools).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    @cached_property
    def sources(self) -> str:
        """The text of all templates: it shows what the model's calls and reasoning look like."""
        return "\n".join(template.source for template in self._templates.values())

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the model gets to see tools at all; a template may leave them out."""
        function = {
            "name": "probe_tool",
            "description": "probe",
            "parameters": {"type": "object", "properties": {}},
        }
        tools = [{"type": "function", "function": function}]
        try:
            return "probe_tool" in self.render([{"role": "user", "content": "probe"}], tools=tools)
        except TemplateError:
            return False

    def _template(self, tools: Any) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))
