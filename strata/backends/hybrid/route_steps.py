"""Norm, router and choice, one op after the other."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import KernelSet, RouterOnDevice
from strata.device.base import Launch
from strata.memory.regions import Arena


def route_in_steps(
    kernels: KernelSet, x: Matrix, hidden: Matrix | None, router: RouterOnDevice, scratch: Arena
) -> Iterator[Launch]:
    """`KernelSet.norm_and_route` for a set, or a number of rows, that has nothing better."""
    if hidden is None:
        hidden = Matrix(scratch.take(x.buffer.nbytes, "rows of a guess"), *x.shape)
    experts = router.spec.experts
    logits = Matrix(scratch.take(x.rows * experts * 4, "router logits"), x.rows, experts)
    yield from kernels.rms_norm(x, *router.norm, hidden)
    yield from kernels.plain_linear(hidden, router.matrix, router.bias, logits)
    yield from kernels.route(logits, router.spec, router.select_bias, router.routes)
