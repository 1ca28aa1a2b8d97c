"""Every kernel in the emulator, three orders of threads, all checks on, against the reference backend."""

from __future__ import annotations

import cases_attention
import cases_elements
import cases_embedding
import cases_expert_prefill
import cases_experts
import cases_head_topk
import cases_heads
import cases_linear
import cases_linear_prefill
import cases_norm
import cases_norm_route
import cases_prefill
import cases_router
import cases_verify
import cases_w8a8
import cases_wide
import cases_wrappers
import pytest
from cases import Case
from runners import EmulatedRunner

from strata.backends.cuda.emulator import ORDERS, Order

ALL = [
    *cases_wrappers.CASES,
    *cases_norm.CASES,
    *cases_linear.CASES,
    *cases_linear_prefill.CASES,
    *cases_w8a8.CASES,
    *cases_experts.CASES,
    *cases_expert_prefill.CASES,
    *cases_elements.CASES,
    *cases_embedding.CASES,
    *cases_attention.CASES,
    *cases_prefill.CASES,
    *cases_wide.CASES,
    *cases_heads.CASES,
    *cases_router.CASES,
    *cases_norm_route.CASES,
    *cases_head_topk.CASES,
    *cases_verify.CASES,
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_checked(case: Case, order: Order) -> None:
    prepared = case.make()
    EmulatedRunner(order).run(prepared.call)
    prepared.check()


@pytest.mark.parametrize("case", [*cases_norm.CASES, *cases_wrappers.CASES], ids=str)
def test_fast_build(case: Case) -> None:
    prepared = case.make()
    EmulatedRunner(checked=False).run(prepared.call)
    prepared.check()
