"""The reference's ops against numpy told another way: the truth must be checked by something, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_model import BF16, as_bf16, pack_bf16

from strata.backends.base import AttentionCall, ExpertBank, Gating, KvSpec
from strata.core import Batch, KvDtype, Sequence
from strata.plan.spec import AttentionSpec, RopeSpec
from strata.store.formats import FORMATS, ExpertLayout, PackedShape, PackedTensor

torch = pytest.importorskip("torch")
from strata.backends.reference import ReferenceBackend  # noqa: E402

RNG = np.random.default_rng(5)
SILU = Gating("silu")


def random(*shape: int) -> np.ndarray:
    return as_bf16(RNG.standard_normal(shape))


def weight(backend: ReferenceBackend, matrix: np.ndarray) -> object:
    return backend.weight(PackedTensor("w", PackedShape(BF16, *matrix.shape), pack_bf16(matrix)))


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """8 gate rows, 8 up rows, 8 gate rows ...; rows padded with zeros to a multiple of 8."""
    padding = [(0, -len(gate) % 8)] + [(0, 0)] * (gate.ndim - 1)
    pairs = [np.pad(part, padding).reshape(-1, 8, *gate.shape[1:]) for part in (gate, up)]
    return np.stack(pairs, axis=1).reshape(-1, *gate.shape[1:])


@pytest.fixture(params=["float32", "float64"])
def backend(request: pytest.FixtureRequest) -> ReferenceBackend:
    return ReferenceBackend(getattr(torch, request.param))


def test_supports_every_format_and_no_other(backend: ReferenceBackend) -> None:
    assert all(backend.supports("linear", fmt) for fmt in FORMATS)
    assert backend.supports("attention", "int8")
    assert not backend.supports("linear", "int8") and not backend.supports("attention", "w4g64")
    assert not backend.supports("conv", "bf16")


def test_matrix_products_and_norms(backend: ReferenceBackend) -> None:
    x, matrix, bias, norm = random(3, 20), random(17, 20), random(17), random(5)
    array = backend.vector(x)
    expected = x.astype(np.float64) @ matrix.T.astype(np.float64)
    ours = backend.linear(array, weight(backend, matrix), backend.vector(bias))
    np.testing.assert_allclose(backend.to_numpy(ours), expected + bias, atol=1e-5)
    np.testing.assert_allclose(backend.plain_linear(array, backend.vector(matrix)), expected, atol=1e-5)
    groups = x.reshape(3, 4, 5).astype(np.float64)
    normed = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + 1e-3) * norm
    np.testing.assert_allclose(
        backend.rms_norm(array, backend.vector(norm), 1e-3), normed.reshape(3, 20), atol=1e-6
    )
    np.testing.assert_array_equal(
        backend.embedding(weight(backend, matrix), np.array([16, 0], np.int32), 2.0), matrix[[16, 0]] * 2
    )


def test_residual_is_changed_in_place(backend: ReferenceBackend) -> None:
    residual, branch = backend.vector(random(2, 8)), backend.vector(random(2, 8))
    expected = residual + 0.5 * branch
    backend.add(residual, branch, 0.5)
    assert torch.equal(residual, expected)


def test_head_ops(backend: ReferenceBackend) -> None:
    x, matrix = random(2, 3 * 4), random(3 * 5, 4)
    ours = backend.head_linear(backend.vector(x), weight(backend, matrix), 3)
    expected = np.einsum("rhi,hoi->rho", x.reshape(2, 3, 4), matrix.reshape(3, 5, 4)).reshape(2, 15)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    parts = backend.split_heads(backend.vector(x), 3, [1, 3])
    assert parts[0].tolist() == x[:, [0, 4, 8]].tolist()
    assert torch.equal(backend.join_heads(parts, 3), backend.vector(x))


@pytest.mark.parametrize("interleave", [False, True])
def test_rotation_turns_pairs_of_the_leading_dims(backend: ReferenceBackend, interleave: bool) -> None:
    rope = RopeSpec("default", 100.0, 6, interleaved=interleave)
    spec = AttentionSpec(2, 2, 8, 1.0, rope)
    x, positions = random(3, 16), np.array([0, 1, 9], np.int32)
    ours = backend.to_numpy(backend.prepare_heads(backend.vector(x), 2, positions, spec, None, 0.0))
    heads, expected = x.reshape(3, 2, 8), x.reshape(3, 2, 8).copy()
    for row, position in enumerate(positions):
        for pair in range(3):
            a, b = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + 3)
            turn = np.exp(1j * position * 100.0 ** (-2 * pair / 6))
            z = (heads[row, :, a] + 1j * heads[row, :, b]) * turn
            expected[row, :, a], expected[row, :, b] = z.real, z.imag
    np.testing.assert_allclose(ours.reshape(3, 2, 8), expected, atol=1e-5)


def test_norm_before_clip_before_rotation(backend: ReferenceBackend) -> None:
    """OLMoE's order: with the clip first, large inputs would all have norm 1 afterwards."""
    spec = AttentionSpec(2, 2, 4, 1.0, RopeSpec("default", 1e4, 0), clip_qkv=0.9, qk_norm="full")
    x = random(2, 8) * 50
    ours = backend.prepare_heads(
        backend.vector(x), 2, np.zeros(2, np.int32), spec, backend.vector(np.ones(8)), 0
    )
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(ours, normed.clip(-0.9, 0.9), atol=1e-6)


KV = KvSpec(layers=2, kv_heads=2, key_dim=8, value_dim=4, page_tokens=4, dtype="f32")


def attend(
    backend: ReferenceBackend, kv: KvSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray, **call: object
) -> np.ndarray:
    """All tokens of one request at once, over pages in no order."""
    pages = np.array([3, 0, 2], np.int32)
    batch = Batch(
        np.zeros(len(q), np.int32),
        np.arange(len(q), dtype=np.int32),
        (Sequence(0, len(q), 0, pages),),
        np.zeros(0, np.int32),
    )
    cache = backend.kv_cache(kv, 4)
    values = None if kv.value_in_key else backend.vector(v)
    sinks = call.pop("sinks", None)
    settings = AttentionCall(1, 4, 0.3, sinks=None if sinks is None else backend.vector(sinks), **call)
    return backend.to_numpy(
        backend.attention(backend.vector(q), backend.vector(k), values, cache, batch, settings)
    )


def attend_by_hand(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int = 0, sinks: np.ndarray | None = None
) -> np.ndarray:
    """q [rows, 4 heads * 8], k [rows, 2, 8], v [rows, 2, dv]."""
    rows = []
    for t in range(len(q)):
        seen = range(max(0, t - window + 1) if window else 0, t + 1)
        for head in range(4):
            scores = np.array(
                [0.3 * q[t, head * 8 : head * 8 + 8] @ k[s, head // 2] for s in seen], np.float64
            )
            shares = np.exp(scores)
            total = shares.sum() + (0 if sinks is None else np.exp(sinks[head]))
            rows.append(sum(share / total * v[s, head // 2] for share, s in zip(shares, seen, strict=True)))
    return np.array(rows).reshape(len(q), -1)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0, 3.0, 0.0], np.float32)])
def test_attention(backend: ReferenceBackend, window: int, sinks: np.ndarray | None) -> None:
    q, k, v = random(11, 32), random(11, 16), random(11, 8)
    expected = attend_by_hand(q, k.reshape(11, 2, 8), v.reshape(11, 2, 4), window, sinks)
    np.testing.assert_allclose(attend(backend, KV, q, k, v, window=window, sinks=sinks), expected, atol=2e-6)


def test_values_inside_keys(backend: ReferenceBackend) -> None:
    kv = replace(KV, value_in_key=True)
    q, k = random(6, 32), random(6, 16)
    heads = k.reshape(6, 2, 8)
    expected = attend_by_hand(q, heads, heads[:, :, :4])
    np.testing.assert_allclose(attend(backend, kv, q, k, k), expected, atol=2e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2**-7), ("int8", 1 / 127), ("int8g32", 1 / 127)])
def test_rounded_caches_stay_within_their_step(dtype: KvDtype, bound: float) -> None:
    """One token attends to itself alone: the output is its value as the cache holds it."""
    backend = ReferenceBackend()
    q, k, v = random(1, 32), random(1, 16), RNG.standard_normal((1, 8)).astype(np.float32)
    output = attend(backend, replace(KV, dtype=dtype), q, k, v).reshape(2, 2, 4)
    error = np.abs(output - v.reshape(2, 1, 4))
    assert error.max() > 0, "nothing was rounded"
    largest = np.abs(v.reshape(2, 1, 4)).max(axis=2, keepdims=True)
    assert (error <= largest * bound / 2 * 1.001).all()


def test_int8_cache_of_zeros_is_zero() -> None:
    zeros = np.zeros((2, 32), np.float32)
    output = attend(ReferenceBackend(), replace(KV, dtype="int8"), zeros, zeros[:, :16], zeros[:, :8])
    assert (output == 0).all()


@pytest.mark.parametrize("gating", [SILU, Gating("gelu_tanh"), Gating("swiglu_clamped", 1.7, 0.5)], ids=str)
def test_dense_ffn_of_odd_width(backend: ReferenceBackend, gating: Gating) -> None:
    x, gate, up, down = random(3, 10), random(13, 10), random(13, 10), random(10, 13)
    ours = backend.ffn(
        backend.vector(x), weight(backend, interleaved(gate, up)), weight(backend, down), 13, gating
    )
    g, u = (torch.from_numpy(x.astype(np.float64) @ part.T) for part in (gate, up))
    if gating.kind == "swiglu_clamped":
        g, u = g.clamp(max=0.5), u.clamp(-0.5, 0.5)
        middle = g * torch.sigmoid(1.7 * g) * (u + 1)
    else:
        act = torch.nn.functional.silu if gating is SILU else torch.nn.GELU("tanh")
        middle = act(g) * u
    np.testing.assert_allclose(ours, middle.numpy() @ down.T, atol=5e-5)


def expert_bank(slices: int, biases: bool, parts: list[tuple[np.ndarray, ...]]) -> ExpertBank:
    """Records of (gate, up, down, gate_bias, up_bias, down_bias), laid out as ExpertLayout says."""
    layout = ExpertLayout(BF16, BF16, 16, 128, slices, biases)
    records = []
    for gate, up, down, gate_bias, up_bias, down_bias in parts:
        record = np.zeros(layout.record_bytes, np.uint8)

        def put(offset: int, data: np.ndarray, record: np.ndarray = record) -> None:
            record[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

        for part, cut in enumerate(np.split(np.arange(128), slices)):
            put(layout.gate_up_offset(part), pack_bf16(interleaved(gate[cut], up[cut])))
            put(layout.down_offset(part), pack_bf16(np.ascontiguousarray(down[:, cut])))
            if biases:
                place = layout.gate_up_bias_offset + part * layout.gate_up.rows * 4
                put(place, interleaved(gate_bias[cut], up_bias[cut]))
        if biases:
            put(layout.down_bias_offset, down_bias)
        records.append(record)
    return ExpertBank(0, len(records), layout, records.__getitem__)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("biases", [False, True])
def test_experts_slices_and_biases(backend: ReferenceBackend, slices: int, biases: bool) -> None:
    shapes = [(128, 16), (128, 16), (16, 128), (128,), (128,), (16,)]
    parts = [
        tuple(random(*shape) * (1 if len(shape) == 2 or biases else 0) for shape in shapes) for _ in range(3)
    ]
    x = random(2, 16)
    ids, weights = np.array([[2, 0], [0, 2]], np.int32), np.array([[0.7, 0.3], [1.0, 0.0]], np.float32)
    ours = backend.experts(backend.vector(x), ids, weights, expert_bank(slices, biases, parts), SILU)
    expected = np.zeros((2, 16))
    for row in range(2):
        for index, share in zip(ids[row], weights[row], strict=True):
            gate, up, down, gate_bias, up_bias, down_bias = parts[index]
            g, u = gate @ x[row] + gate_bias, up @ x[row] + up_bias
            expected[row] += share * (down @ (g / (1 + np.exp(-g)) * u) + down_bias)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-4)


def test_experts_without_tokens_are_never_read(backend: ReferenceBackend) -> None:
    asked: list[int] = []
    bank = expert_bank(
        1, False, [tuple(random(*s) for s in [(128, 16), (128, 16), (16, 128), (1,), (1,), (1,)])] * 5
    )
    counting = replace(bank, record=lambda index: (asked.append(index), bank.record(index))[1])
    ids, weights = np.array([[1], [3], [1]], np.int32), np.ones((3, 1), np.float32)
    backend.experts(backend.vector(random(3, 16)), ids, weights, counting, SILU)
    assert asked == [1, 3]


def test_shape_mistakes_name_op_and_numbers() -> None:
    backend = ReferenceBackend()
    x = backend.vector(random(2, 8))
    with pytest.raises(ValueError, match="linear: columns of x 8, columns of the weight 9"):
        backend.linear(x, weight(backend, random(4, 9)))
    with pytest.raises(ValueError, match="split: columns of x 8, sum of the sizes 7"):
        backend.split(x, [3, 4])
    with pytest.raises(ValueError, match=r"embedding: token ids 0\.\.4 but 4 rows"):
        backend.embedding(weight(backend, random(4, 9)), np.array([0, 4], np.int32), 1.0)
    with pytest.raises(ValueError, match="ffn: width 9, columns of down 10"):
        backend.ffn(x, weight(backend, random(32, 8)), weight(backend, random(8, 10)), 9, SILU)
    with pytest.raises(ValueError, match="rms_norm: 8 columns are no multiple of 3 weights"):
        backend.rms_norm(x, backend.vector(np.ones(3)), 1e-6)
