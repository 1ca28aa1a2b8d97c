"""Errors by layer: none between equals, found where they were put, and marked by the rule that is stated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from tiny_model import VOCAB, TinyStore, make_backend, moe_spec

from strata.engine.compare_layers import FLOOR, JUMP, LayerErrors, compare_layers, own_errors, suspects
from strata.engine.engine import Engine, EngineOptions
from strata.model.decoder import Decoder

TOKENS = np.random.default_rng(5).integers(VOCAB, size=40).tolist()


def engine(name: str = "cpu", fmt: str = "w4g64", activations: str = "f32") -> Engine:
    spec = moe_spec(4)
    backend = make_backend(name, 1, activations)  # type: ignore[arg-type]
    decoder = Decoder(spec, TinyStore(spec, fmt=fmt), backend)
    return Engine(decoder, EngineOptions(64, 16, VOCAB, page_tokens=8, kv_dtype="f32"))


def walk(one: Engine, other: Engine) -> list[LayerErrors]:
    return list(compare_layers(one, other, TOKENS))


def test_a_model_beside_itself_differs_nowhere() -> None:
    for found in walk(engine(), engine()):
        assert (found.max_abs, found.relative, found.own) == (0, 0, 0)
        assert found.cosine == pytest.approx(1) and found.worst_cosine == pytest.approx(1)
        assert found.routes in (None, 1.0) and found.logits in (None, 0.0)


def test_the_walk_is_the_forward_pass() -> None:
    """What stands behind the last layer is what the head reads."""
    from strata.engine.compare_layers import _batch, _Walk

    made = engine()
    batch = dataclasses.replace(_batch(TOKENS, made), logit_rows=np.arange(len(TOKENS), dtype=np.int32))
    logits = np.array(made.decoder.forward(batch, made.executor.cache))
    walked = _Walk(made, batch, made.executor.cache)
    residual = walked.begin()
    for index in range(made.decoder.spec.layers):
        seen = walked.step(index, residual)
        expected = made.decoder.routes.ids.get(index)
        assert (seen.routes is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(seen.routes, expected)
    decoder = made.decoder
    again = decoder.backend.logits(residual, batch.logit_rows, decoder.final_norm, decoder.head)
    np.testing.assert_array_equal(again, logits)


def test_backends_agree_and_cheap_activations_do_not() -> None:
    close = walk(engine("reference"), engine())
    assert all(one.own is not None and one.own < 1e-4 for one in close)
    rough = walk(engine(), engine(activations="int8"))
    assert all(1e-4 < (one.own or 0) < 0.1 for one in rough)
    assert rough[-1].relative > 0 and any(one.logits for one in rough)


def test_a_broken_layer_is_found_and_its_successors_are_not() -> None:
    """The layers behind it inherit the error, but given the reference's input they make none."""
    good, bad = engine(), engine()
    layers = list(bad.decoder.layers)
    attention = layers[1].attention
    layers[1] = dataclasses.replace(layers[1], attention=dataclasses.replace(attention, scale=0.5))
    bad.decoder.layers = tuple(layers)
    found = walk(good, bad)
    assert suspects(found) == [1]
    assert found[0].own == 0 and all(one.own == 0 and one.relative > 0 for one in found[2:])


def test_a_layer_that_gives_nan_is_found() -> None:
    """Its successors get numbers from the reference and are not to blame."""
    one, other = engine(), engine()
    norm = other.decoder.layers[1].attention.norm.weight
    norm[:] = np.nan
    found = walk(one, other)
    assert suspects(found) == [1] and math.isnan(found[2].relative)
    unknown = [dataclasses.replace(error, own=None) for error in found]
    assert suspects(unknown)[0] == 1


def errors(own: Sequence[float | None], relative: Sequence[float] | None = None) -> list[LayerErrors]:
    behind = relative or [0.0] * len(own)
    return [
        LayerErrors(i, 0, 1, 1, 1, r, o, None, None) for i, (o, r) in enumerate(zip(own, behind, strict=True))
    ]


def test_the_rule() -> None:
    usual = 2 * FLOOR
    assert suspects(errors([usual, usual, usual * JUMP * 1.01, usual])) == [2]
    assert suspects(errors([usual, usual, usual * JUMP * 0.99, usual])) == []
    assert suspects(errors([0, 0, FLOOR * 0.9, 0])) == [], "rounding is no jump"
    assert suspects(errors([0, 0, math.nan, math.nan])) == [2, 3]


def test_unknown_errors_are_what_the_square_grew_by() -> None:
    grown = errors([None, None, None], [0.03, 0.05, 0.05])
    assert own_errors(grown) == pytest.approx([0.03, 0.04, 0])
