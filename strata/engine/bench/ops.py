"""Times every op of a backend while the decoder runs as always: real order, arguments and caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.backends.base import AttentionCall, Backend, ExpertBank, Gating, KvSpec, Weight
from strata.core import Batch
from strata.engine.bench.figures import OpTimes, OpTotal
from strata.store.formats import PackedShape, PackedTensor

_OPS = (
    *("embedding", "rms_norm", "add_rms_norm", "add", "scaled_by_sigmoid", "linear", "plain_linear"),
    *("head_linear", "take_rows", "split", "join_heads", "split_heads", "prepare_heads", "attention"),
    *("route", "ffn", "experts"),
)


@dataclass(frozen=True)
class Cost:
    """What one call of an op reads of weights and KV, and its multiply-adds; shape: for people.

    quantized: its weights are integers.
    """

    shape: str = ""
    bytes: int = 0
    macs: int = 0
    quantized: bool = False


@dataclass
class _Sum:
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    macs: int = 0
    quantized: bool = False


@dataclass
class OpTimer:
    """Collects the ops between `start` and `stop`. own: seconds that the timing itself took."""

    clock: Callable[[], float] = time.perf_counter
    sums: dict[tuple[str, str], _Sum] = field(default_factory=dict)
    native: float = 0.0
    own: float = 0.0
    has_native: bool = False

    def wrap(self, backend: Backend) -> Backend:
        """The same backend with a clock on every op."""
        extension = getattr(backend, "ops", None)
        if extension is not None:
            self.has_native = True
            backend.ops = _TimedExtension(extension, self)  # type: ignore[attr-defined]
        timed: Any = _TimedBackend(backend, self)
        return timed  # type: ignore[no-any-return]

    def start(self) -> None:
        """Forget everything so far."""
        self.sums, self.native, self.own = {}, 0.0, 0.0

    def stop(self, steps: int, seconds: float) -> OpTimes:
        """The ops since `start`, which took `seconds` of wall time with all that is between them."""
        ops = [
            OpTotal(name, shape, s.calls, s.seconds, s.bytes, s.macs, s.quantized)
            for (name, shape), s in self.sums.items()
        ]
        rest = seconds - self.own - sum(op.seconds for op in ops)
        return OpTimes(steps, tuple(ops), rest, self.native if self.has_native else None)

    def note(self, name: str, cost: Cost, seconds: float) -> None:
        """Count one call."""
        found = self.sums.setdefault((name, cost.shape), _Sum())
        found.calls += 1
        found.seconds += seconds
        found.bytes += cost.bytes
        found.macs += cost.macs
        found.quantized = cost.quantized


class _TimedExtension:
    """A compiled module whose functions note their time; its classes are handed out as they are."""

    def __init__(self, module: Any, timer: OpTimer) -> None:
        self._module = module
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if callable(found) and not isinstance(found, type):
            found = self._timed(found)
        setattr(self, name, found)
        return found

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timer = self._timer

        def timed(*args: Any, **named: Any) -> Any:
            begin = timer.clock()
            result = function(*args, **named)
            timer.native += timer.clock() - begin
            return result

        return timed


class _TimedBackend:
    """Stands before a backend; what it does not know passes through."""

    def __init__(self, backend: Backend, timer: OpTimer) -> None:
        self._backend = backend
        self._timer = timer
        self._costs = _Costs()
        for name in _OPS:
            setattr(self, name, self._timed(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def weight(self, tensor: PackedTensor) -> Weight:
        """The backend's handle; its shape is remembered."""
        handle = self._backend.weight(tensor)
        self._costs.tensors[id(handle)] = (tensor, handle)
        return handle

    def kv_cache(self, spec: KvSpec, pages: int) -> Any:
        """The backend's cache; its geometry is remembered."""
        self._costs.kv = spec
        return self._backend.kv_cache(spec, pages)

    def _timed(self, name: str) -> Callable[..., Any]:
        op, timer = getattr(self._backend, name), self._timer
        cost: Callable[..., Cost] = getattr(self._costs, name, _no_cost)

        def timed(*args: Any, **named: Any) -> Any:
            begin = timer.clock()
            result = op(*args, **named)
            end = timer.clock()
            timer.note(name, cost(*args, **named), end - begin)
            timer.own += timer.clock() - end
            return result

        return timed


def _no_cost(*args: Any, **named: Any) -> Cost:
    """Ops that read activations only, which the caches hold."""
    return Cost()


class _Costs:
    """Shape, bytes and multiply-adds of a call, by op; the arguments are those of `Backend`'s methods."""

    def __init__(self) -> None:
        # The handle is kept with its tensor, so that no other can get its id.
        self.tensors: dict[int, tuple[PackedTensor, Weight]] = {}
        self.kv: KvSpec | None = None

    def linear(self, x: Any, weight: Weight, bias: Any = None) -> Cost:
        tensor, _ = self.tensors[id(weight)]
        shape = tensor.shape
        return Cost(_part(tensor), shape.nbytes, len(x) * shape.rows * shape.cols, _quantized(shape))

    def head_linear(self, x: Any, weight: Weight, heads: int) -> Cost:
        return self.linear(x, weight)

    def plain_linear(self, x: Any, matrix: Any, bias: Any = None) -> Cost:
        rows, cols = matrix.shape
        return Cost(f"f32 {cols} -> {rows}", 4 * rows * cols, len(x) * rows * cols)

    def embedding(self, weight: Weight, token_ids: Any, scale: float) -> Cost:
        tensor, _ = self.tensors[id(weight)]
        row_bytes = tensor.shape.nbytes // tensor.shape.padded_rows
        return Cost(f"{tensor.shape.format.name} {tensor.shape.cols}", len(token_ids) * row_bytes)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Cost:
        return Cost(str(len(weight)))

    def add_rms_norm(self, residual: Any, branch: Any, scale: float, weight: Any, eps: float) -> Cost:
        return Cost(str(len(weight)))

    def prepare_heads(self, x: Any, heads: int, *_: Any) -> Cost:
        return Cost(f"{heads} x {x.shape[1] // heads}")

    def ffn(self, x: Any, gate_up: Weight, down: Weight, width: int, gating: Gating) -> Cost:
        both = [self.tensors[id(handle)][0].shape for handle in (gate_up, down)]
        macs = len(x) * 3 * width * both[1].rows
        label = f"{_formats(*both)} {both[0].cols} x {width}"
        return Cost(label, sum(shape.nbytes for shape in both), macs, _quantized(*both))

    def experts(self, x: Any, ids: Any, weights: Any, bank: ExpertBank, gating: Gating) -> Cost:
        layout = bank.layout
        used = int(np.count_nonzero(np.bincount(ids.ravel())))
        both = layout.gate_up, layout.down
        label = f"{_formats(*both)} {layout.hidden} x {layout.width}, top {ids.shape[1]}"
        macs = ids.size * 3 * layout.hidden * layout.width
        return Cost(label, used * layout.payload_bytes, macs, _quantized(*both))

    def attention(self, q: Any, k: Any, v: Any, cache: Any, batch: Batch, call: AttentionCall) -> Cost:
        kv = self.kv
        assert kv is not None
        token_bytes = kv.page_bytes // (kv.layers * kv.page_tokens)
        seen = sum(_visible(s.start, s.count, call.window) for s in batch.sequences)
        pairs = sum(_pairs(s.start, s.count, call.window) for s in batch.sequences)
        window = f", window {call.window}" if call.window else ""
        label = f"{kv.dtype} {call.heads}/{kv.kv_heads} x {kv.key_dim}{window}"
        return Cost(label, seen * token_bytes, pairs * call.heads * (kv.key_dim + kv.value_dim))


def _visible(start: int, count: int, window: int) -> int:
    """Tokens of KV that a sequence's rows see between them."""
    return min(start + count, window + count - 1) if window else start + count


def _pairs(start: int, count: int, window: int) -> int:
    """Query and key pairs of a sequence: row i sees start + i + 1 tokens, at most the window."""
    seen = np.arange(start + 1, start + count + 1)
    return int((np.minimum(seen, window) if window else seen).sum())


def _part(tensor: PackedTensor) -> str:
    """The tensor's part of a layer, format and size: "attn.qkv w4g64 2048 -> 5120"."""
    name = tensor.name.removesuffix(".weight")
    if name.startswith("layers."):
        name = name.split(".", 2)[2]
    return f"{name} {tensor.shape.format.name} {tensor.shape.cols} -> {tensor.shape.rows}"


def _formats(*shapes: PackedShape) -> str:
    return "+".join(dict.fromkeys(shape.format.name for shape in shapes))


def _quantized(*shapes: PackedShape) -> bool:
    return all(shape.format.values not in ("bf16", "f16") for shape in shapes)
