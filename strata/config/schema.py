"""The options: one frozen dataclass per section, and the kind of every value.

`configs/default.yaml` lists the same options with comments; a test keeps the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from strata.config.kinds import Boolean, Choice, Integer, Kind, Location, NodesOr, Number, Size, Text, Texts
from strata.core import MOST_DRAFTED, PAGE_TOKENS, SamplingParams

BUNDLED_MODELS = ("demo", "demo-draft", "smollm2")


@dataclass(frozen=True)
class ModelConfig:
    """Which model. path: a store, a GGUF file, a Hugging Face directory, or a name of BUNDLED_MODELS.

    context: tokens of prompt and answer together; None: decided from the model and the KV size.
    cache_dir: where imported models are kept; "auto": $XDG_CACHE_HOME/strata.
    """

    path: str = ""
    context: int | None = None
    cache_dir: str = "auto"


@dataclass(frozen=True)
class ConvertConfig:
    """Weight formats of a model that is imported on first use; "auto" keeps the source's own quantization
    where a format holds it without loss."""

    experts: str = "auto"
    shared: str = "auto"
    head: str = "auto"
    embed: str = "auto"
    slices: int = 2


@dataclass(frozen=True)
class BackendConfig:
    """What computes. threads: None = one per core. activations: what the cpu backend's products read."""

    name: Literal["cpu", "reference"] = "cpu"
    threads: int | None = None
    activations: Literal["int8", "int8_per_token", "f32"] = "int8"


@dataclass(frozen=True)
class KvConfig:
    """The KV cache. size: bytes it may take; None = a share of the free memory, never more than needed.

    dtype: of what is kept; int8g*: with a scale per so many elements of a head, not per head.
    tier: where pages live when there is a device.
    """

    dtype: Literal["int8", "int8g128", "int8g64", "int8g32", "bf16", "f32"] = "int8"
    page_tokens: int = PAGE_TOKENS
    size: int | None = None
    tier: Literal["auto", "device", "host"] = "auto"


@dataclass(frozen=True)
class EngineConfig:
    """prefill_chunk: tokens of one prefill step. requests: how many may fill the context at once.

    max_running: how many take part in one step, however short they are; None: 16, or `requests` if more.
    """

    prefill_chunk: int = 512
    requests: int = 1
    max_running: int | None = None


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding. use: auto is draft where there is one, else ngram (prompt n-grams).

    draft: a small model with the same tokenizer, as model.path has it, or a store of the model's own layer
    that predicts further tokens. start, least, most: tokens of a draft; costs: drafts are cut to what pays,
    by measured step times; promise: over what a request is then never slower than 0.97 of plain decoding,
    all of it or any 64 steps.
    """

    use: Literal["auto", "off", "ngram", "draft"] = "auto"
    draft: str = ""
    start: int = 8
    least: int = 0
    most: int = MOST_DRAFTED
    costs: bool = True
    promise: Literal["request", "window"] = "request"


@dataclass(frozen=True)
class DeviceConfig:
    """The graphics card. use: "emulated" is one made of software, for tests and simulation: no speed;
    "cuda" a real one, on which nothing has run so far, so that "auto" leaves it idle in a run.

    kernels: "cuda" are those of csrc/cuda, which the emulated card runs in an emulator; "host" the
    processor's in their place, which only the emulated card can have; "auto" is whichever is fast.

    activations: what matrices in w8 are multiplied with, of prompts and of single tokens: "bf16", or "int8"
    with a scale per row, which is the quicker one for prompts; "auto" is bf16.

    memory: bytes of it that may be used, reserve: of them, kept free.

    workspace: the most that activations and buffers take; None: what a prefill chunk needs.

    graphs: decoding launches what lies before a layer's read-back as one CUDA graph; never run on hardware.
    """

    use: Literal["auto", "none", "emulated", "cuda"] = "auto"
    kernels: Literal["auto", "host", "cuda"] = "auto"
    activations: Literal["auto", "bf16", "int8"] = "auto"
    memory: int | None = None
    reserve: int = 3 << 30
    workspace: int | None = None
    graphs: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """Routed experts. slots: on the device, over all layers; misses: where the others are computed.

    page_lock: those that cross to a device again and again are page-locked in host memory.
    """

    slots: int | None = None
    misses: Literal["auto", "cpu", "fetch"] = "auto"
    page_lock: bool = True


@dataclass(frozen=True)
class HostConfig:
    """Host memory. memory: bytes that may be used.

    numa: how experts are spread over the memory nodes, or "off": nothing is bound to any; a tuple: the nodes
    that may be used, spread as with "auto". copies: bytes of every node for copies of the hottest experts,
    where they are interleaved.
    """

    memory: int | None = None
    numa: Literal["auto", "off", "partition", "interleave", "replicate"] | tuple[int, ...] = "auto"
    copies: int = 0


@dataclass(frozen=True)
class ChatConfig:
    """system: the system prompt. template: a jinja file instead of the model's own. history: where the
    chat keeps typed lines ("auto": $XDG_STATE_HOME/strata/history, "none": nowhere)."""

    system: str = ""
    template: str = "auto"
    history: str = "auto"


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP service. api_key_file: one key a line; the variable STRATA_API_KEY holds one, too.

    model_name: what clients see; "auto" is the model's own. queue: requests that may wait. body: bytes of a
    request. connections: at the same time. Seconds: client_ for a client to send its request or to accept a
    piece of the answer, answer_ for a whole answer, stall_ without a token until /health says degraded,
    drain_ for running answers after SIGTERM. cors: origins of web pages that may ask. warm_up: short answers
    before the first request, for at most warm_up_seconds. log: of the request lines on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key_file: str = ""
    model_name: str = "auto"
    queue: int = 64
    connections: int = 512
    body: int = 16 << 20
    client_seconds: int = 30
    answer_seconds: int = 3600
    stall_seconds: int = 60
    drain_seconds: int = 30
    cors: tuple[str, ...] = ()
    warm_up: bool = True
    warm_up_seconds: int = 30
    log: Literal["text", "json"] = "text"


@dataclass(frozen=True)
class Config:
    """What was asked for; never rewritten. `origins` says where each given option came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    host: HostConfig = field(default_factory=HostConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat: ChatConfig = field(default_factory=ChatConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    file: Path | None = field(default=None, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def where(self, option: str) -> str:
        """Where `section.key` was given: "file:line:column", a command line option, or "default"."""
        return self.origins.get(option, "default")

    def show(self) -> str:
        """Every option with its value and origin, one a line; sizes in bytes."""
        lines = []
        for section, kinds in KINDS.items():
            values = getattr(self, section)
            for key, kind in kinds.items():
                option = f"{section}.{key}"
                lines.append(f"{option} = {kind.show(getattr(values, key))}    # {self.where(option)}")
        return "\n".join(lines)


# Ranges of the sampling options are those of SamplingParams, which has the last word.
KINDS: dict[str, dict[str, Kind]] = {
    "model": {
        "path": Location(("", *BUNDLED_MODELS)),
        "context": Integer(2, 1 << 24, word="auto", word_number=0),
        "cache_dir": Location(("auto",)),
    },
    "convert": {
        "experts": Text(),
        "shared": Text(),
        "head": Text(),
        "embed": Text(),
        "slices": Integer(1, 64),
    },
    "backend": {
        "name": Choice(("cpu", "reference")),
        "threads": Integer(1, 1024, word="auto"),
        "activations": Choice(("int8", "int8_per_token", "f32")),
    },
    "kv": {
        "dtype": Choice(("int8", "int8g128", "int8g64", "int8g32", "bf16", "f32")),
        "page_tokens": Integer(8, 4096, multiple=8),
        "size": Size(low=1 << 20),
        "tier": Choice(("auto", "device", "host")),
    },
    "engine": {
        "prefill_chunk": Integer(1, 1 << 16),
        "requests": Integer(1, 1024),
        "max_running": Integer(1, 1024, word="auto"),
    },
    "speculative": {
        "use": Choice(("auto", "off", "ngram", "draft")),
        "draft": Location(("", *BUNDLED_MODELS)),
        "start": Integer(0, MOST_DRAFTED),
        "least": Integer(0, MOST_DRAFTED),
        "most": Integer(0, MOST_DRAFTED),
        "costs": Boolean(),
        "promise": Choice(("request", "window")),
    },
    "device": {
        "use": Choice(("auto", "none", "emulated", "cuda")),
        "kernels": Choice(("auto", "host", "cuda")),
        "activations": Choice(("auto", "bf16", "int8")),
        "memory": Size(low=1 << 28),
        "reserve": Size(low=0, auto=False),
        "workspace": Size(low=1 << 20),
        "graphs": Boolean(),
    },
    "experts": {
        "slots": Integer(1, 1 << 20, word="auto"),
        "misses": Choice(("auto", "cpu", "fetch")),
        "page_lock": Boolean(),
    },
    "host": {
        "memory": Size(low=1 << 28),
        "numa": NodesOr(("auto", "off", "partition", "interleave", "replicate")),
        "copies": Size(low=0, auto=False),
    },
    "sampling": {
        "temperature": Number(0, 100),
        "top_k": Integer(-1, 1 << 31),
        "top_p": Number(0, 1),
        "min_p": Number(0, 1),
        "repeat_penalty": Number(0, 100),
        "repeat_last_n": Integer(-1, 1 << 24),
        "presence_penalty": Number(-2, 2),
        "frequency_penalty": Number(-2, 2),
        "seed": Integer(0, (1 << 63) - 1, word="random", word_number=-1),
        "stop": Texts(),
        "max_tokens": Integer(0, 1 << 24, word="unlimited", word_number=-1),
        "ignore_eos": Boolean(),
    },
    "chat": {"system": Text(), "template": Location(("auto",)), "history": Location(("auto", "none"))},
    "server": {
        "host": Text(empty=False),
        "port": Integer(0, 65535),
        "api_key_file": Location(),
        "model_name": Text(empty=False),
        "queue": Integer(1, 1 << 16),
        "connections": Integer(2, 1 << 16),
        "body": Size(low=1 << 10, auto=False),
        "client_seconds": Integer(1, 3600),
        "answer_seconds": Integer(1, 1 << 20),
        "stall_seconds": Integer(1, 1 << 20),
        "drain_seconds": Integer(0, 1 << 20),
        "cors": Texts(),
        "warm_up": Boolean(),
        "warm_up_seconds": Integer(1, 3600),
        "log": Choice(("text", "json")),
    },
}


def section_class(name: str) -> Any:
    """The dataclass of a section."""
    return type(getattr(Config(), name))
