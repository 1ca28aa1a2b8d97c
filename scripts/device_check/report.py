"""The findings for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from device_check.stages import Outcome
from strata.hardware.gpu_stack import GpuStack

Lines = Callable[[dict[str, Any]], Iterator[str]]


def report(mode: str, stack: GpuStack, outcomes: Sequence[Outcome]) -> str:
    """A page: what was run on, then stage by stage."""
    card = stack.cards[0].name if stack.cards else "no card"
    lines = [f"Strata device check, on: {mode} ({card}, driver {stack.driver or 'none'})"]
    lines += [f"missing: {one.what}; remedy: {one.remedy}" for one in stack.missing]
    for outcome in outcomes:
        lines.append("")
        lines.append(
            f"{outcome.name}: {outcome.status}, {outcome.seconds:.1f} s of {outcome.limit}: {outcome.what}"
        )
        lines += [f"  {line}" for line in _inside(outcome)]
    return "\n".join(lines) + "\n"


def _inside(outcome: Outcome) -> Iterator[str]:
    if outcome.result:
        yield from FORMS[outcome.name](outcome.result)
        yield from str(outcome.result.get("problem", "")).splitlines()
    elif outcome.status in ("failed", "timeout"):
        yield from outcome.log.splitlines()[-12:]


def _build(result: dict[str, Any]) -> Iterator[str]:
    seconds = result.get("seconds", {})
    took = f"{sum(seconds.values()):.1f} s"
    yield f"{len(seconds)} kernel files for {result['arch']} in {took}; CPU {result['isa']}"


def _doctor(result: dict[str, Any]) -> Iterator[str]:
    yield from result["lines"]


def _kernels(result: dict[str, Any]) -> Iterator[str]:
    if "cases" in result:
        yield f"{result['cases']} cases, {len(result['failed'])} failed, {result['skipped']} skipped"
        yield from result["failed"][:20]


def _parity(result: dict[str, Any]) -> Iterator[str]:
    for name in ("all experts", "few slots"):
        equal = result.get(name, [])
        yield f"{name}: {sum(equal)} of {len(equal)} answers are the CPU's, {result['tokens']} tokens each"


def _bandwidth(result: dict[str, Any]) -> Iterator[str]:
    yield f"a copy inside the card: {result['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    for name, op in result["ops"].items():
        rate, micros = op["bytes_per_second"] / 1e9, op["seconds"] * 1e6
        yield f"{name:<42} {micros:9.1f} us {rate:8.1f} GB/s {op['share']:6.1%}"


def _overlap(result: dict[str, Any]) -> Iterator[str]:
    copy, kernels, both = (1e3 * result[f"{name}_seconds"] for name in ("copy", "compute", "together"))
    yield f"copy {copy:.2f} ms ({result['copy_bytes_per_second'] / 1e9:.1f} GB/s), kernels {kernels:.2f} ms"
    yield f"together {both:.2f} ms: {result['hidden']:.0%} of the shorter is hidden"


def _locking(result: dict[str, Any]) -> Iterator[str]:
    size = result["bytes"] / 1e9
    for name, what in (("mapped", "a file mapped read-only"), ("arena", "memory of our own")):
        one = result[name]
        if one["refused"]:
            yield f"{what}: not locked: {one['refused']}"
        else:
            lock = f"in {1e3 * one['lock_seconds']:.1f} ms"
            yield f"{what}: locked {lock}, then copied at {size / one['copy_seconds']:.1f} GB/s"
    yield f"plain memory: through the staging buffers at {size / result['staged']:.1f} GB/s"


def _decode(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['layers']} layers, {result['model']}"
    for name in ("every expert", "fetched", "auto"):
        scene = result.get(name)
        if scene:
            answered = ", ".join(f"{count} {how}" for how, count in scene["experts"].items() if count)
            yield f"{name}: {scene['slots']} slots, {scene['tokens_per_second']:.1f} tokens/s"
            yield f"  {scene['milliseconds_per_layer']:.3f} ms a layer; experts: {answered}"


FORMS: dict[str, Lines] = {
    "build": _build,
    "doctor": _doctor,
    "kernels": _kernels,
    "parity": _parity,
    "bandwidth": _bandwidth,
    "overlap": _overlap,
    "locking": _locking,
    "decode": _decode,
}
