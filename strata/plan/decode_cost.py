"""What decoding steps of a plan take, by the cost model: what speculative decoding starts from."""

from __future__ import annotations

from strata.hardware.profile import HardwareProfile
from strata.plan.cost import Placement, Step, step_cost
from strata.plan.footprint import Footprint
from strata.plan.plan import Plan
from strata.plan.routing import UNIFORM, published_curve
from strata.plan.speeds import speeds_of


class DecodeCost:
    """Seconds of a decoding step with any number of rows: a draft's rows read the union of their experts.

    More rows miss more experts, on the device and in memory; `routing.batch_hits` says how many.
    """

    def __init__(self, model: Footprint, plan: Plan, machine: HardwareProfile) -> None:
        self._model, self._plan = model, plan
        threads = {node.node: len(node.cpus) for node in plan.threads}
        self._speeds = speeds_of(machine, threads, plan.host.spread)
        self._curve = published_curve(model.experts) if model.moe_layers else UNIFORM

    def __call__(self, rows: int, *, requests: int, depth: int) -> float:
        """`rows` tokens of `requests` requests, each with `depth` tokens before them."""
        plan, on_device = self._plan, self._plan.kv.tier == "device"
        pages = self._model.pages(depth + rows // requests, requests) if on_device else 0
        used = pages * self._model.page_bytes
        slots = plan.device.slots_beside(used) if plan.device else 0
        place = Placement(plan.device is not None, slots, on_device, plan.host.in_memory, plan.misses)
        step = Step(rows, requests, depth, rows)
        return step_cost(self._model, self._speeds, place, step, self._curve).seconds
