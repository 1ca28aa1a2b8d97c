"""The ring through which a prompt's experts stream: as long as attention takes, and within limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import check, part
from models import GIB, machine, toy
from published_sizes import QWEN3

from strata.errors import CapacityError
from strata.hardware.profile_file import load_profile
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.planner import make_plan
from strata.plan.speeds import speeds_of
from strata.plan.stream import MOST_BYTES, StreamRing, stream_ring

MACHINE = load_profile("rtx3090-2x-e5-2680v4")
SPEEDS = speeds_of(MACHINE, {}, "interleave")


def buffers(model: Footprint, room: int | None = None, **asked: int | None) -> int:
    return stream_ring(model, SPEEDS, PlanOptions(**asked), room).buffers  # type: ignore[arg-type]


def step_bytes(chunk: int) -> int:
    """Beside the ring: rows, and 64 rows of logits with their 64 best, also by blocks of 4,096."""
    rows, best = (chunk + 64) * QWEN3.activation_bytes, 2 * 64 * (1 + 38)
    return rows + 64 * 4 * (QWEN3.vocab + 2 * QWEN3.hidden + 1 + best) + 64 * 256


def test_the_longer_attention_takes_the_more_must_fit_meanwhile() -> None:
    counts = [buffers(QWEN3, context=16_384, chunk=chunk) for chunk in (32, 512, 2048, 8192)]
    assert counts == sorted(counts)
    assert counts[0] == 2 and counts[-1] == 32, "two at least, a layer's 128 experts by 4 at most"
    assert 2 < counts[1] < counts[2] < 32
    assert buffers(QWEN3, context=2048) < buffers(QWEN3, context=32_768)
    assert buffers(replace(QWEN3, moe_layers=0)) == 2


def test_the_ring_has_a_limit() -> None:
    large = replace(QWEN3, expert_bytes=30 * 2**20)
    assert buffers(large, context=16_384, chunk=65_536) == MOST_BYTES // (4 * large.expert_bytes) == 8
    assert buffers(QWEN3, context=16_384, chunk=8192, room=5 * 4 * QWEN3.expert_bytes) == 5
    assert buffers(QWEN3, context=16_384, chunk=8192, room=0) == 2


def test_the_workspace_holds_the_ring_and_slots_get_the_rest() -> None:
    made = {c: make_plan(QWEN3, MACHINE, PlanOptions(context=16_384, chunk=c)) for c in (32, 8192)}
    for chunk, plan in made.items():
        check(plan, QWEN3)
        assert plan.device is not None
        assert plan.device.stream.buffers == buffers(QWEN3, context=16_384, chunk=chunk)
        ring = plan.device.stream.places * QWEN3.expert_bytes
        assert 0 <= part(plan, "workspace") - step_bytes(chunk) - ring < 1 << 20
    short, long = (made[chunk].device for chunk in (32, 8192))
    assert short is not None and long is not None and short.shared > long.shared


def test_a_capped_workspace_shortens_the_ring() -> None:
    asked = PlanOptions(context=16_384, chunk=2048)
    cap = step_bytes(2048) + 3 * 4 * QWEN3.expert_bytes + (1 << 20)
    capped = make_plan(QWEN3, MACHINE, replace(asked, workspace=cap))
    check(capped, QWEN3)
    assert capped.device is not None and capped.device.stream == StreamRing(3, 4)
    assert part(capped, "workspace") == cap
    with pytest.raises(CapacityError, match=r"raise device\.workspace"):
        make_plan(QWEN3, MACHINE, replace(asked, workspace=step_bytes(2048)))


def test_a_model_that_does_not_route_streams_nothing() -> None:
    dense = toy(moe_layers=0, experts=0, top_k=0, expert_bytes=0, expert_total=0)
    plan = make_plan(dense, machine(), PlanOptions(context=1024))
    check(plan, dense)
    assert part(plan, "workspace") < GIB // 16
