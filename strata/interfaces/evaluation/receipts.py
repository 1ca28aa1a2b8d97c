"""Measured costs: from a comparison into a store, and from a store into words."""

from __future__ import annotations

import datetime
from pathlib import Path

from strata.errors import UsageError
from strata.interfaces.bundled import in_package
from strata.interfaces.evaluation.measuring import Compared
from strata.interfaces.evaluation.subject import Subject
from strata.store.fingerprint import tool_name
from strata.store.manifest import read_manifest
from strata.store.receipts import Receipt, add_receipt, all_formats


def check(one: Subject, two: Subject) -> None:
    """UsageError where a comparison would not be about B's store: both must run with the same settings."""
    for name, mine, theirs in zip(_SETTINGS, _settings(one), _settings(two), strict=True):
        if mine != theirs:
            raise UsageError(
                f"--record is about a store, and {name} is {mine} for A and {theirs} for B",
                remedy="give both the same, with --set",
            )
    if one.path.resolve() == two.path.resolve():
        raise UsageError(f"A and B are the same store, {two.path}", remedy="name what it was made from as A")
    if in_package(two.path):
        raise UsageError(f"{two.path} belongs to the package and is not written to", remedy="copy it first")


def record(found: Compared) -> Path:
    """Write what B lost against A into B's store; returns the file."""
    return add_receipt(found.other.path, _receipt(found))


_SETTINGS = ("kv.dtype", "backend.activations", "backend.name")


def _settings(subject: Subject) -> tuple[str, str, str]:
    return subject.kv_dtype, subject.config.backend.activations, subject.config.backend.name


def _receipt(found: Compared) -> Receipt:
    figures, text, one = found.figures, found.text, found.reference
    return Receipt(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        tool=tool_name(),
        reference=one.spec.name,
        reference_formats=all_formats(read_manifest(one.path)),
        text=text.name,
        text_xxh3=text.xxh3,
        predictions=text.predictions,
        window=text.cut.window,
        second_half=text.cut.second_half,
        kv=one.kv_dtype,
        activations=found.other.activations,
        perplexity=figures.score.perplexity,
        reference_perplexity=figures.reference.perplexity,
        change=figures.change,
        change_error=figures.change_error,
        kl_mean=figures.divergence,
        kl_median=figures.divergence_at(0.5),
        kl_p99=figures.divergence_at(0.99),
        kl_max=figures.divergence_at(1.0),
        top1=figures.agreement,
    )
