"""Whether the statistics that a conversion was given are there, and are of this model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.errors import StoreError, UsageError
from strata.plan.spec import ModelSpec
from strata.store.calibration import CalibrationStats, model_fingerprint
from strata.store.options import ConvertOptions
from strata.store.rows import BlockRows, ValueGuard
from strata.store.source import CheckpointSource, TargetTensor


def with_stats(
    options: ConvertOptions,
    stats: CalibrationStats | None,
    source: CheckpointSource,
    spec: ModelSpec,
    targets: Sequence[TargetTensor],
) -> ConvertOptions:
    """The options with the digest of the statistics that they use, if they use any.

    Raises UsageError where they are missing, superfluous or another model's.
    """
    if not options.calibrated:
        if stats is not None:
            raise UsageError(
                f"{stats.path}: statistics were given, but every part is rounded plainly",
                remedy="add --method gptq (or awq, smooth), or leave --stats out",
            )
        return options
    if stats is None:
        parts = ", ".join(f"{part}={method}" for part, method in _methods_of(options, spec).items())
        raise UsageError(
            f"methods {parts} need statistics of the model's inputs, none were given",
            remedy="make them with `strata calibrate MODEL --out STATS`, then add --stats STATS",
        )
    if options.factored and not stats.info.moments:
        raise UsageError(
            f"{stats.path} has no second moments, which gptq needs",
            remedy="run `strata calibrate` without --no-moments, or choose awq or smooth",
        )
    check_same_model(stats, source, spec, targets)
    return dataclasses.replace(options, stats=stats.digest)


def _methods_of(options: ConvertOptions, spec: ModelSpec) -> dict[str, str]:
    """Of the parts that the model has: no routed experts in a dense one, no head where it is the embedding.

    All that were asked for where none of them is left: what is wrong is to be named.
    """
    absent = {"experts"} if not any(spec.moe_layers) else set()
    absent |= {"head"} if spec.tied_head else set()
    present = {part: method for part, method in options.methods.items() if part not in absent}
    return present or dict(options.methods)


def check_same_model(
    stats: CalibrationStats, source: CheckpointSource, spec: ModelSpec, targets: Sequence[TargetTensor]
) -> None:
    """UsageError unless the statistics are of the model in `source`; StoreError where that lacks a norm."""
    plain = {target.name: target for target in targets if target.kind == "plain"}

    def values(name: str) -> NDArray[np.float32]:
        if name not in plain:
            raise StoreError(f"{source.path}: the model has no tensor {name}")
        guard = ValueGuard(allow_nan=True)
        blocks = [BlockRows(source, block, guard) for block in plain[name].sources]
        return np.concatenate([block.floats(0, block.count).reshape(-1) for block in blocks])

    stats.check_model(spec, model_fingerprint(spec, values))
