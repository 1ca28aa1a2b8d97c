"""Norms as launches: alone, and with the router that they are for."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand, or_null, require_multiple
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import NormOf, RouterOnDevice
from strata.device.base import Launch
from strata.memory.regions import Arena
from strata.plan.spec import RouterSpec

ROUTED_ROWS = 16
"""Up to so many rows norm, router and choice are one launch: each tile of 8 reads the matrix once more."""


def norm_launch(launcher: Launcher, x: Matrix, norm: NormOf, out: Matrix) -> Launch:
    """out = norm of x, in groups of the norm's columns."""
    columns = norm.weight.cols
    require_multiple("rms_norm", "columns", columns, 4)
    shape = launch_shapes.rms_norm(x.rows * (x.cols // columns), columns)
    pointers = (x.buffer, NULL, norm.weight.buffer, out.buffer, NULL, NULL, NULL)
    reads = (x.buffer, norm.weight.buffer)
    return launcher.make(shape, (*pointers, columns, 1.0, norm.eps), reads, (out.buffer,))


def router_rules(spec: RouterSpec) -> tuple[int | float, ...]:
    """The arguments that say how a router chooses."""
    score = launch_shapes.ROUTER_SCORES[spec.score]
    groups = (spec.groups, spec.top_groups, int(spec.group_score == "top2"))
    return spec.experts, spec.top_k, score, *groups, int(spec.normalize), spec.normalize_eps, spec.scale


def norm_and_route(
    launcher: Launcher, x: Matrix, hidden: Matrix | None, router: RouterOnDevice, scratch: Arena
) -> Iterator[Launch]:
    """One launch."""
    spec, routes = router.spec, router.routes
    require_multiple("norm_route", "columns", x.cols, 4)
    shape = launch_shapes.norm_route(x.rows, spec.experts, spec.top_k, spec.groups)
    tickets = launcher.tickets_for(shape.grid[1])
    assert tickets is not None, f"a ticket for each of {shape.grid[1]} tiles of rows"
    logits = scratch.take(x.rows * spec.experts * 4, "router logits")
    weights = (router.norm.weight.buffer, router.matrix.buffer)
    biases = (or_null(router.bias), or_null(router.select_bias))
    outputs = (routes.ids.buffer, routes.weights.buffer)
    pointers = (x.buffer, or_null(hidden), *weights, *biases, *outputs, logits, tickets)
    arguments: tuple[Operand, ...] = (*pointers, x.rows, x.cols // 4, *router_rules(spec), router.norm.eps)
    read = (matrix.buffer for matrix in (router.bias, router.select_bias) if matrix is not None)
    kept = () if hidden is None else (hidden.buffer,)
    macs = x.rows * spec.experts * x.cols
    reads, writes = (x.buffer, *weights, *read, tickets), (*kept, *outputs, logits, tickets)
    yield launcher.make(shape, arguments, reads, writes, macs)
