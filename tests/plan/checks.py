"""What holds for every plan."""

from __future__ import annotations

from strata.plan.footprint import Footprint
from strata.plan.plan import Plan


def part(plan: Plan, name: str, where: str = "device") -> int:
    parts = (plan.device or plan.host).parts if where == "device" else plan.host.parts
    return sum(entry.nbytes for entry in parts if entry.name == name)


def check(plan: Plan, model: Footprint) -> None:
    """What holds for every plan."""
    kv = plan.kv
    assert sum(entry.nbytes for entry in plan.host.parts) == plan.host.total
    assert all(entry.nbytes >= 0 for entry in plan.host.parts)
    assert kv.nbytes == model.kv_ceiling(kv.context, kv.requests) == kv.pages * model.page_bytes
    assert kv.pages >= kv.requests * -(-kv.context // kv.page_tokens)
    assert 2 <= kv.context <= model.context
    assert plan.cpus and len(set(plan.cpus)) == len(plan.cpus)
    assert all(entry.tokens_per_second > 0 for entry in plan.predictions)
    assert all(0 <= entry.hit_rate <= 1 + 1e-9 for entry in plan.predictions)
    device = plan.device
    if device is None:
        assert kv.tier == "host" and part(plan, "KV pages", "host") == kv.nbytes
        return
    assert sum(entry.nbytes for entry in device.parts) == device.total
    assert all(entry.nbytes >= 0 for entry in device.parts)
    assert min(model.top_k, model.expert_count) <= device.slots <= model.expert_count
    assert device.slots <= device.slots_beside(0) <= model.expert_count
    if kv.tier == "device":
        assert part(plan, "KV pages") == kv.nbytes
        assert device.slots == device.slots_beside(kv.nbytes)
    else:
        assert part(plan, "KV pages", "host") == kv.nbytes
