"""The hybrid backend's kernel set over csrc/cuda. It runs in the emulator; it has never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.attention import CudaAttention
from strata.backends.cuda.experts import expert_launches
from strata.backends.cuda.head import topk_launches, verify_launches
from strata.backends.cuda.kernels import NULL, KernelLoader
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.cuda.linear import gates_at_once, gating_numbers, linear_launches, require_heads
from strata.backends.cuda.norms import ROUTED_ROWS, norm_and_route, norm_launch, router_rules
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.arrays import DeviceRoutes, DraftTables, Matrix, PackedOnDevice
from strata.backends.hybrid.attention_steps import attention_in_steps
from strata.backends.hybrid.kernel_set import (
    ExpertGroup,
    HeadColumns,
    KvPlaces,
    Launches,
    NormOf,
    Projections,
    RouterOnDevice,
    SumInto,
)
from strata.backends.hybrid.route_steps import route_in_steps
from strata.backends.parts import AttentionCall, Gating
from strata.device.base import Buffer, Launch
from strata.memory.regions import Arena
from strata.plan.spec import AttentionSpec, RouterSpec


class CudaKernels:
    """See `KernelSet`. loader: gives compiled kernels. prefill: when kernels for prompts serve."""

    def __init__(self, loader: KernelLoader, prefill: PrefillChoice | None = None) -> None:
        self._launcher = Launcher(loader)
        self._attention = CudaAttention(self._launcher)
        self._prefill = prefill or PrefillChoice()

    def use_tickets(self, tickets: Buffer) -> None:
        """For kernels whose last block joins what the others made."""
        self._launcher.tickets = tickets

    def rms_norm(self, x: Matrix, weight: Matrix, eps: float, out: Matrix) -> Launches:
        """One launch."""
        yield norm_launch(self._launcher, x, NormOf(weight, eps), out)

    def add(self, residual: Matrix, branch: Matrix, scale: float) -> Launches:
        """One launch."""
        count = residual.rows * residual.cols
        shape = launch_shapes.elements("add", count, 1)
        arguments = (residual.buffer, branch.buffer, count, scale)
        yield self._launcher.make(shape, arguments, (branch.buffer, residual.buffer), (residual.buffer,))

    def scale_by_sigmoid(self, x: Matrix, gate: Matrix) -> Launches:
        """One launch."""
        shape = launch_shapes.elements("scale_by_sigmoid", x.cols, x.rows)
        arguments = (x.buffer, gate.buffer, x.cols)
        yield self._launcher.make(shape, arguments, (gate.buffer, x.buffer), (x.buffer,))

    def linear(
        self,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        out: Matrix,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """One launch, or two for a prompt, three with a norm."""
        return self._linear(x, weight, bias, out, scratch, norm=norm)

    def head_linear(
        self, x: Matrix, weight: PackedOnDevice, heads: int, out: Matrix, scratch: Arena
    ) -> Launches:
        """One launch, or two for a prompt."""
        require_heads(weight.shape.rows, heads)
        return self._linear(x, weight, None, out, scratch, heads)

    def add_linear(
        self,
        residual: Matrix,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        scale: float,
        scratch: Arena,
    ) -> Launches:
        """As many as `linear`."""
        return self._linear(x, weight, bias, residual, scratch, add=scale)

    def _linear(
        self,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        out: Matrix,
        scratch: Arena,
        heads: int = 0,
        add: float | None = None,
        norm: NormOf | None = None,
    ) -> Iterator[Launch]:
        choice = self._prefill
        return linear_launches(self._launcher, x, weight, bias, out, heads, scratch, choice, add, norm)

    def plain_linear(self, x: Matrix, matrix: Matrix, bias: Matrix | None, out: Matrix) -> Launches:
        """One launch."""
        require_multiple("plain_linear", "columns", matrix.cols, 4)
        shape = launch_shapes.plain_linear(matrix.rows, x.rows)
        sizes = (x.rows, matrix.cols // 4, matrix.rows)
        arguments = (x.buffer, matrix.buffer, or_null(bias), out.buffer, *sizes)
        reads = (x.buffer, matrix.buffer, *(() if bias is None else (bias.buffer,)))
        yield self._launcher.make(shape, arguments, reads, (out.buffer,), x.rows * matrix.rows * matrix.cols)

    def take_rows(self, x: Matrix, rows: Matrix, out: Matrix) -> Launches:
        """One launch."""
        shape = launch_shapes.elements("take_rows", x.cols, out.rows)
        arguments = (x.buffer, rows.buffer, out.buffer, x.cols)
        yield self._launcher.make(shape, arguments, (x.buffer, rows.buffer), (out.buffer,))

    def copy_heads(
        self, x: Matrix, source: HeadColumns, out: Matrix, target: HeadColumns, heads: int, size: int
    ) -> Launches:
        """One launch."""
        shape = launch_shapes.elements("copy_heads", heads * size, x.rows)
        places = (heads, size, source.head, source.first, target.head, target.first)
        reads = (x.buffer, out.buffer)  # what is not copied to stays
        yield self._launcher.make(shape, (x.buffer, out.buffer, *places), reads, (out.buffer,))

    def prepare_heads(
        self,
        x: Matrix,
        heads: int,
        tables: tuple[Matrix, Matrix] | None,
        spec: AttentionSpec,
        norm: Matrix | None,
        eps: float,
    ) -> Launches:
        """One launch, and one before it for a norm over all heads."""
        dim = x.cols // heads
        if norm is not None and norm.cols != dim:
            yield from self.rms_norm(x, norm, eps, x)
            norm = None
        operands: list[Operand] = [or_null(norm), *((t.buffer for t in tables) if tables else (NULL, NULL))]
        shape = launch_shapes.heads_of_rows("prepare_heads", heads, x.rows, dim)
        rotary = 2 * tables[0].cols if tables else 0
        numbers = (heads, dim, rotary, int(spec.rope.interleaved), eps, float(spec.clip_qkv or 0.0))
        reads = (x.buffer, *_buffers(norm, *(tables or ())))
        yield self._launcher.make(shape, (x.buffer, *operands, *numbers), reads, (x.buffer,))

    def attention(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix | None,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """Append, attend: two launches, four for a batch of split prompts and single rows."""
        return self._attention.launches(q, k, v, places, call, sinks, out, scratch)

    def attention_of(
        self,
        projections: Projections,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """One launch that prepares and appends, then as `attention`. A norm over all heads needs its own."""
        if projections.spec.qk_norm == "full":
            return attention_in_steps(self, projections, places, call, sinks, out, scratch)
        return self._attention.of_projections(projections, places, call, sinks, out, scratch)

    def route(
        self, logits: Matrix, spec: RouterSpec, select_bias: Matrix | None, routes: DeviceRoutes
    ) -> Launches:
        """One launch."""
        shape = launch_shapes.route(logits.rows, spec.experts, spec.top_k, spec.groups)
        outputs = (routes.ids.buffer, routes.weights.buffer)
        arguments = (logits.buffer, or_null(select_bias), *outputs, *router_rules(spec))
        yield self._launcher.make(shape, arguments, (logits.buffer, *_buffers(select_bias)), outputs)

    def norm_and_route(
        self,
        x: Matrix,
        hidden: Matrix | None,
        router: RouterOnDevice,
        scratch: Arena,
    ) -> Launches:
        """One launch; three for the rows of a prompt."""
        if x.rows > ROUTED_ROWS:
            return route_in_steps(self, x, hidden, router, scratch)
        return norm_and_route(self._launcher, x, hidden, router, scratch)

    def head_topk(
        self, logits: Matrix, columns: int, values: Matrix, ids: Matrix, scratch: Arena
    ) -> Launches:
        """Two launches: over spans of the vocabulary, and over what is best of them."""
        return topk_launches(self._launcher, logits, columns, values, ids, scratch)

    def verify_draft(
        self, values: Matrix, ids: Matrix, drafts: DraftTables, accepted: Matrix, tokens: Matrix
    ) -> Launches:
        """One launch."""
        return verify_launches(self._launcher, values, ids, drafts, accepted, tokens)

    def ffn(
        self,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """Two launches: gate_up with its activation, down; five for a prompt."""
        return self._ffn(x, gate_up, down, gating, out, scratch)

    def add_ffn(
        self,
        residual: Matrix,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        scale: float,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """As many as `ffn`, and one for the norm of a prompt."""
        return self._ffn(x, gate_up, down, gating, residual, scratch, scale, norm)

    def _ffn(
        self,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        out: Matrix,
        scratch: Arena,
        add: float | None = None,
        norm: NormOf | None = None,
    ) -> Iterator[Launch]:
        width, rows, launcher, choice = down.shape.cols, x.rows, self._launcher, self._prefill
        hidden = Matrix(scratch.take(rows * width * 4, "hidden"), rows, width)
        if gates_at_once(gate_up, rows, choice):
            yield from linear_launches(
                launcher, x, gate_up, None, hidden, 0, scratch, choice, norm=norm, gating=gating
            )
        else:
            columns = gate_up.shape.rows
            both = Matrix(scratch.take(rows * columns * 4, "gate and up"), rows, columns)
            yield from self._linear(x, gate_up, None, both, scratch, norm=norm)
            arguments = (both.buffer, hidden.buffer, width, *gating_numbers(gating))
            shape = launch_shapes.elements("gate", width, rows)
            yield launcher.make(shape, arguments, (both.buffer,), (hidden.buffer,))
        yield from self._linear(hidden, down, None, out, scratch, add=add)

    def experts(
        self, x: Matrix, routes: DeviceRoutes, group: ExpertGroup, into: SumInto, scratch: Arena
    ) -> Launches:
        """Two launches: gate_up, then down and the weighted sum; one before them for tables of more than
        NEAR_WORDS words; five for a prompt, which is packed first and whose sum is alone."""
        return expert_launches(self._launcher, x, group, into, scratch, self._prefill)


def _buffers(*matrices: Matrix | None) -> Iterator[Buffer]:
    return (matrix.buffer for matrix in matrices if matrix is not None)
