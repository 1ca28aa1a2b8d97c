"""From the option model.path to a model that answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from strata.config import Config
from strata.core import Request
from strata.engine.engine import Engine
from strata.engine.load import load_engine
from strata.errors import ConfigError, ContextOverflowError
from strata.hardware.profile import HardwareProfile
from strata.interfaces import activations
from strata.interfaces.chat_template import ChatFormat
from strata.interfaces.detokenizer import Detokenizer, StopMatcher
from strata.interfaces.grammar.compiler import GrammarCompiler
from strata.interfaces.hardware import device_run, remembered_machine, with_device
from strata.interfaces.importing import Progress
from strata.interfaces.messages import Message
from strata.interfaces.planning import plan_run
from strata.interfaces.quality import quality_of
from strata.interfaces.speculation import speculation_options
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.plan.plan import Plan
from strata.store.verify import check_small_files

_MAX_TEMPLATE_BYTES = 1 << 22
_FIRST_LOOK = 16  # characters per token of the context; few texts have more


class TextStream:
    """Token ids to text, cut before the first stop text. shown: special tokens that stay in the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        continuation: bool,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._characters = Detokenizer(tokenizer, continuation=continuation, shown=shown)
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text came."""
        return self._matcher.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop text that came."""
        return self._matcher.found

    def add(self, token: int) -> str:
        """The text that is certain now."""
        return self._matcher.add(self._characters.add(token))

    def flush(self) -> str:
        """The rest, at the end."""
        return self._matcher.add(self._characters.flush()) + self._matcher.flush()


@dataclass(frozen=True)
class LoadedModel:
    """A model with its text side. quality: what its formats cost, inputs: what products read, in words."""

    name: str
    plan: Plan
    engine: Engine
    tokenizer: Tokenizer
    format: ChatFormat
    quality: str = ""
    inputs: str = ""

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes constraints for this model's tokens."""
        return GrammarCompiler(self.tokenizer)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may take together."""
        return self.engine.options.context

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.tokenizer.stop_ids

    @property
    def kv_place(self) -> str:
        """What memory the KV cache is: which pages the system gave, and why no better ones."""
        return self.engine.kv_place

    @property
    def numa_place(self) -> str:
        """What is bound to which memory nodes, with the figures of the latest look; "" where nothing is."""
        placement = self.engine.placement
        return placement.describe() if placement is not None else ""

    @property
    def note(self) -> str:
        """What a user should be told: of the chat template, and of a heat file that is damaged."""
        return "; ".join(filter(None, (self.format.note, self.engine.heat_fault)))

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text that is continued as it is; control tokens in it count."""
        self.check_length(text)
        return self.tokenizer.encode_completion(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the answer begins; control tokens in messages are text."""
        for message in messages:
            self.check_length(message["content"])
        return self.format.encode(messages)

    def text_stream(
        self, request: Request, *, continuation: bool, shown: frozenset[int] = frozenset()
    ) -> TextStream:
        """For one answer. continuation: the text goes on after a raw prompt. shown: see `TextStream`."""
        return TextStream(self.tokenizer, request.sampling.stop, continuation=continuation, shown=shown)

    def check_length(self, text: str) -> None:
        """Refuse text far beyond the context by its beginning: encoding 16 MB takes 25 s and 3 GB."""
        size = _FIRST_LOOK * self.context
        while size < len(text):
            count = len(self.tokenizer.encode(text[:size]))
            if count > self.context:
                raise ContextOverflowError(count, self.context, at_least=True)
            size *= 4


def open_model(
    config: Config, machine: HardwareProfile | None = None, progress: Progress | None = None
) -> LoadedModel:
    """The model that the configuration names; imported first if it is no store.

    machine: this one as it is known already; None: asked from the system, with remembered speeds.
    progress: see `store_path`.
    """
    path = store_path(config, progress=progress)
    machine = with_device(machine or remembered_machine(), config)
    check_small_files(path)
    tokenizer = Tokenizer.load(path)
    format = ChatFormat(tokenizer, _template_source(config.chat.template))
    try:
        plan = plan_run(path, config, machine)
    except ConfigError as error:
        raise ConfigError(f"{error.cause} ({config.where('model.context')})", remedy=error.remedy) from None
    engine = load_engine(
        path,
        plan,
        backend=config.backend.name,
        activations=config.backend.activations,
        valid_tokens=tokenizer.vocab_size,
        device=device_run(config, machine),
        speculation=speculation_options(config, machine, tokenizer, progress),
    )
    name = engine.decoder.spec.name
    inputs = activations.describe(config)
    return LoadedModel(name, plan, engine, tokenizer, format, quality_of(path), inputs)


def _template_source(setting: str) -> str | None:
    """The text of a template file; None for the model's own."""
    if setting == "auto":
        return None
    if Path(setting).exists() and not Path(setting).is_file():  # opening a pipe would wait for a writer
        raise ConfigError(f"{setting}: the chat template is not a file", remedy="give a jinja file's path")
    with Path(setting).open("rb") as file:
        data = file.read(_MAX_TEMPLATE_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{setting}: the chat template is not UTF-8: {error.reason} at {error.start}",
            remedy="save it as UTF-8",
        ) from None
