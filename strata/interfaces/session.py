"""A conversation with one model: messages in, answers out. The chat and the one-answer mode share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.config import Config
from strata.errors import RequestError
from strata.interfaces.answer import Answer
from strata.interfaces.messages import Message

if TYPE_CHECKING:
    from strata.interfaces.grammar.source import Grammar
    from strata.interfaces.models import LoadedModel


class Session:
    """Owns the messages; the model belongs to the caller.

    raw: the text goes to the model as it is; there is then no conversation, every prompt stands alone.
    grammar: of every answer; in a conversation it begins behind the reasoning, which is then not shown.
    """

    def __init__(
        self, model: LoadedModel, config: Config, *, raw: bool = False, grammar: Grammar | None = None
    ) -> None:
        self.model = model
        self.raw = raw
        self.grammar = grammar
        self.sampling = config.sampling
        self.system = config.chat.system
        self.messages: list[Message] = []
        self.last: Answer | None = None
        self._asked = 0

    @property
    def title(self) -> str:
        """What a user should know about the model, in a line."""
        return f"{self.model.name}, context {self.context} tokens"

    @property
    def remark(self) -> str:
        """What a user should be told before the first message, or ""."""
        return "" if self.raw else self.model.note

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may take together."""
        return self.model.context

    def all_messages(self) -> list[Message]:
        """The conversation with its system prompt."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def reset(self) -> None:
        """Forgets the messages, keeps system prompt and sampling."""
        self.messages.clear()

    def ask(self, text: str) -> Answer:
        """The answer to a message, not begun yet; a message that does not fit leaves no trace."""
        if self.raw:
            answer = self._answer(self.model.encode_text(text))
            if self.grammar is not None:
                constrain(answer, self.grammar, None)
            return answer
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self.model.encode_chat(self.all_messages())
            answer = self._answer(prompt)
            if self.grammar is not None:
                constrain(answer, self.grammar, self.model.format.render(self.all_messages()))
            return answer
        except BaseException:
            self.messages.pop()
            raise

    def ask_again(self) -> Answer:
        """Another answer to the last user message; what came after it is dropped."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if not self.messages:
            raise RequestError("there is no message to answer again", remedy="write one first")
        return self.ask(self.messages.pop()["content"])

    def finish(self, answer: Answer) -> None:
        """Takes an answer, whole or stopped, into the conversation."""
        self.last = answer
        if self.raw:
            return
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        elif self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()  # nothing came: two user turns in a row would break most templates

    def statistics(self) -> str:
        """Figures of the last answer."""
        if self.last is None:
            return "no answer yet"
        from strata.interfaces.statistics import describe, memory_bandwidth

        return describe(self.last, memory_bandwidth(self.last))

    def _answer(self, prompt: list[int]) -> Answer:
        self._asked += 1
        return Answer(self.model, f"run-{self._asked}", prompt, self.sampling, continuation=self.raw)


def constrain(answer: Answer, grammar: Grammar, prompt: str | None) -> None:
    """Make the answer follow the grammar. prompt: a conversation's text, None: the answer continues a text.

    Raises RequestError for a grammar that cannot be used.
    """
    grammars = answer.model.grammars
    if prompt is None:
        answer.request.constraint = grammars.compile(grammars.alone(grammar))
        return
    from strata.interfaces.server.formats.answer_grammar import answer_source
    from strata.interfaces.server.formats.choose import AnswerFormat

    form = AnswerFormat(answer.model.format.sources)
    source = answer_source(form, grammars.rules(), prompt, grammar, None)
    answer.request.constraint = grammars.compile(source)
    answer.read_with(form.parser(prompt, None), form.shown_ids(answer.model.tokenizer))
