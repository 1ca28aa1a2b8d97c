"""A speculator as it was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.speculator import Speculator
from strata.hardware.profile import HardwareProfile
from strata.plan.decode_cost import DecodeCost
from strata.plan.footprint import Footprint
from strata.plan.plan import Plan


@dataclass(frozen=True)
class SpeculationOptions:
    """machine: what the plan was made for. costs: whether steps' times cut the lengths further."""

    machine: HardwareProfile
    lengths: LengthOptions = field(default_factory=LengthOptions)
    costs: bool = True


def make_speculator(
    options: SpeculationOptions,
    model: Footprint,
    plan: Plan,
    clock: Callable[[], float] = time.perf_counter,
) -> Speculator:
    """For an engine that runs `model` by `plan`. clock: that of its steps."""
    estimate = DecodeCost(model, plan, options.machine) if options.costs else None
    return Speculator(NgramProposer(), options.lengths, estimate, clock)
