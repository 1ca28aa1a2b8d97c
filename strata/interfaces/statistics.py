"""Figures of an answer, each beside its limit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from strata.errors import CapacityError
from strata.interfaces.answer import Answer

if TYPE_CHECKING:
    from strata.engine.metrics import Phase
    from strata.engine.speculative.figures import SpeculationFigures

_PROBE_SECONDS = 0.1
_HARDLY_ANY = 0.05
"""Tokens proposed per pass, below which a mean length would be shown as 0.0."""


def describe(answer: Answer, bandwidth: float = 0.0) -> str:
    """Tokens and tokens/s of prefill and decode, and what decode read per second.

    bandwidth: of the memory, in bytes/s, measured in the same run; 0: unknown.
    """
    context = f"{len(answer.request.tokens)} of {answer.model.context} context tokens used"
    progress = answer.progress
    if progress is None:
        return f"{len(answer.request.prompt)} prompt tokens, {answer.tokens} answer tokens, {context}"
    lines = [f"prefill  {_rate(progress.prefill)}", f"decode   {_rate(progress.decode)}"]
    speed = progress.decode.bytes_per_second
    if speed:
        share = (
            f", {100 * speed / bandwidth:.0f} % of the {bandwidth / 1e9:.1f} GB/s measured"
            if bandwidth
            else ""
        )
        lines.append(f"memory   {speed / 1e9:.2f} GB/s of weights and KV read by decode{share}")
    lines += speculation(answer)
    shared = f" ({answer.request.shared} of them computed before)" if answer.request.shared else ""
    tokens = f"tokens   {len(answer.request.prompt)} prompt{shared}, {answer.tokens} answer; {context}"
    return "\n".join([*lines, tokens])


def speculation(answer: Answer) -> list[str]:
    """What drafts did since the engine started; nothing where none were tried, unless a model was to."""
    speculator = answer.model.engine.speculator
    if speculator is None:
        return []
    found, name = speculator.figures, speculator.proposer.name
    if not found.proposed:
        return [] if speculator.proposer.free else [f"drafts   none: nothing promised to pay ({name})"]
    if found.proposed < _HARDLY_ANY * found.forwards:
        return [
            f"drafts   hardly any, more did not promise to pay: {found.proposed} tokens proposed in "
            f"{found.forwards} passes, {found.accepted} accepted ({proposers(found, name)})"
        ]
    share = "" if speculator.proposer.free else f", {100 * found.draft_share:.0f} % of the time for drafts"
    return [
        f"drafts   {found.tokens_per_forward:.2f} tokens per pass, {100 * found.acceptance:.0f} % of tested "
        f"tokens accepted ({proposers(found, name)}), {found.mean_length:.1f} proposed on average{share}"
    ]


def proposers(found: SpeculationFigures, asked: str) -> str:
    """Who proposed what was verified, where several did with their acceptance. asked: who was meant to."""
    names = {name: name if name == asked else f"{name} in place of {asked}" for name in found.proposed_by}
    if len(names) == 1:
        return next(iter(names.values()))
    return "; ".join(
        f"{shown}: {found.accepted_by[name]} of {found.tested_by[name]}" for name, shown in names.items()
    )


def to_json(answer: Answer, bandwidth: float) -> dict[str, Any]:
    """The same for programs; seconds, bytes, tokens/s and bytes/s."""
    progress = answer.progress
    return {
        "model": answer.model.name,
        "text": answer.text,
        "finish_reason": answer.finish_reason.value if answer.finish_reason else None,
        "prompt_tokens": len(answer.request.prompt),
        "shared_tokens": answer.request.shared,
        "answer_tokens": answer.tokens,
        "context": answer.model.context,
        "prefill": _figures(progress.prefill) if progress else None,
        "decode": _figures(progress.decode) if progress else None,
        "memory_bandwidth": bandwidth,
        "speculation": _speculation_json(answer),
        "kv_place": answer.model.kv_place,
    }


def _speculation_json(answer: Answer) -> dict[str, Any] | None:
    """All figures since the engine started; None without drafts."""
    speculator = answer.model.engine.speculator
    if speculator is None:
        return None
    found = {**dataclasses.asdict(speculator.figures), "recent": list(speculator.figures.recent)}
    return {"proposer": speculator.proposer.name, **found}


def memory_bandwidth(answer: Answer) -> float:
    """Bytes/s that the threads which gave the answer can read now; 0: unknown.

    Unknown where nothing was decoded that could be compared with it, where the backend does not say, or
    memory is short: the probe's buffer must not be what drives a full machine out of it. Measured after the
    answer, so that it delays nothing: most of its third of a second goes into touching the buffer.
    """
    if answer.progress is None or not answer.progress.decode.tokens:
        return 0.0
    from strata.backends.cpu import CpuBackend
    from strata.hardware.bandwidth import PROBE_BYTES, read_bandwidth
    from strata.hardware.host_memory import available_bytes

    backend = answer.model.engine.decoder.backend
    if not isinstance(backend, CpuBackend) or available_bytes() < 2 * PROBE_BYTES:
        return 0.0
    try:
        return read_bandwidth(backend.cpu, _PROBE_SECONDS).best
    except CapacityError:
        return 0.0


def _figures(phase: Phase) -> dict[str, float]:
    return {**dataclasses.asdict(phase), "tokens_per_second": phase.tokens_per_second}


def _rate(phase: Phase) -> str:
    if not phase.seconds:
        return "nothing"
    return f"{phase.tokens_per_second:.1f} tokens/s ({phase.tokens} in {phase.seconds:.2f} s)"
