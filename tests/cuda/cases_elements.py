"""The small ops: element by element, copies, an unpacked matrix; one small packed matrix per head."""

from __future__ import annotations

import numpy as np
import torch
from cases import Case, Prepared, assert_close, bf16_bits, bf16_values, call_of
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.launch_shapes import GATING_KINDS
from strata.backends.parts import Gating
from strata.backends.reference_ffn import gated, separate

RNG = np.random.default_rng


def numbers(seed: int, *shape: int) -> np.ndarray:
    return RNG(seed).standard_normal(shape).astype(np.float32)


def add() -> Prepared:
    residual, branch = numbers(1, 3, 333), numbers(2, 3, 333)
    expected = residual + 0.5 * branch.astype(np.float64)
    call = call_of(
        launch_shapes.elements("add", residual.size, 1), (residual, read_only(branch), residual.size, 0.5)
    )
    return Prepared(call, lambda: assert_close(residual, expected, 1e-6))


def scale_by_sigmoid() -> Prepared:
    x, gate = numbers(3, 3, 300), numbers(4, 3, 1) * 3
    expected = x / (1 + np.exp(-gate.astype(np.float64)))
    call = call_of(launch_shapes.elements("scale_by_sigmoid", 300, 3), (x, read_only(gate), 300))
    return Prepared(call, lambda: assert_close(x, expected, 1e-6))


def take_rows() -> Prepared:
    x, rows, out = numbers(5, 6, 260), np.array([5, 0, 5, 2], np.int32), unwritten((4, 260))
    call = call_of(launch_shapes.elements("take_rows", 260, 4), (read_only(x), read_only(rows), out, 260))
    return Prepared(call, lambda: np.testing.assert_array_equal(out, x[rows]))


def copy_heads() -> Prepared:
    x, out = numbers(6, 2, 5, 70), numbers(7, 2, 5, 90)
    expected = out.copy()
    expected[:, :, 17:81] = x[:, :, 3:67]
    arguments = (read_only(x), out, 5, 64, 70, 3, 90, 17)
    call = call_of(launch_shapes.elements("copy_heads", 5 * 64, 2), arguments)
    return Prepared(call, lambda: np.testing.assert_array_equal(out, expected))


def gate(kind: str, width: int) -> Prepared:
    gating = Gating(kind, 1.3, 1.5)  # type: ignore[arg-type]
    padded = -(-width // 8) * 8
    both, hidden = numbers(8, 3, 2 * padded) * 2, unwritten((3, width))
    wide = torch.from_numpy(both.astype(np.float64))
    expected = np.stack([gated(*separate(row, width), gating).numpy() for row in wide])
    arguments = (read_only(both), hidden, width, GATING_KINDS[kind], gating.alpha, gating.limit)
    call = call_of(launch_shapes.elements("gate", width, 3), arguments)
    return Prepared(call, lambda: assert_close(hidden, expected, 2e-6))


def plain_linear(rows: int, columns: int, outputs: int, bias: bool) -> Prepared:
    x, matrix, offsets = numbers(9, rows, columns), numbers(10, outputs, columns), numbers(11, outputs)
    y = unwritten((rows, outputs))
    expected = x.astype(np.float64) @ matrix.T + (offsets if bias else 0.0)
    arguments = (
        read_only(x),
        read_only(matrix),
        read_only(offsets) if bias else None,
        y,
        rows,
        columns // 4,
        outputs,
    )
    call = call_of(launch_shapes.plain_linear(outputs, rows), arguments)
    return Prepared(call, lambda: assert_close(y, expected, 1e-6), {(1,): matrix.nbytes * -(-rows // 8)})


def head_linear(heads: int, head_rows: int, columns: int, tokens: int) -> Prepared:
    tensor, matrix = random_matrix("w8", heads * head_rows, columns)
    x, y = numbers(12, tokens, heads, columns), unwritten((tokens, heads, head_rows))
    per_head = matrix.reshape(heads, head_rows, columns)
    expected = np.einsum("thc,hrc->thr", bf16_values(bf16_bits(x)).astype(np.float64), per_head)
    shape = launch_shapes.linear("w8", heads * head_rows, tokens, 1)
    sizes = (
        heads * head_rows,
        columns,
        tensor.shape.padded_cols // 64,
        tokens,
        1,
        heads * columns,
        head_rows,
    )
    call = call_of(
        shape, (read_only(tensor.data), read_only(x), None, y, *sizes, 1.0, 0, None, 0.0, -1, 0.0, 0.0, 0)
    )
    return Prepared(call, lambda: assert_close(y, expected, 2e-6), {(0,): tensor.data.nbytes})


CASES = [
    Case("add", "add", add, True),
    Case("scale", "scale_by_sigmoid", scale_by_sigmoid, True),
    Case("rows", "take_rows", take_rows, True),
    Case("heads", "copy_heads", copy_heads, True),
    Case("silu", "gate", lambda: gate("silu", 300), True),
    Case("gelu", "gate", lambda: gate("gelu_tanh", 37), True),
    Case("clamped", "gate", lambda: gate("swiglu_clamped", 37), True),
    Case("few", "plain_linear", lambda: plain_linear(3, 512, 9, True), True),
    Case("many", "plain_linear", lambda: plain_linear(11, 132, 6, False), True),
    Case("w8-heads", "linear", lambda: head_linear(3, 32, 128, 5), True),
]
