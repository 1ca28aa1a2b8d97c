"""What a store's formats cost, in one line: measured, or said to be unmeasured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strata.store.manifest import MANIFEST, Manifest, read_manifest
from strata.store.receipts import Receipt, formats_in_words, lossy_formats, read_receipts

UNMEASURED = "unmeasured"
_FLOATS = ("bf16", "f16", "f32")


def quality_of(store: Path) -> str:
    """For a store: see `describe`; StoreError where it is none."""
    return describe(read_manifest(store), read_receipts(store).receipts)


def rounded_formats(model: Path) -> str:
    """What a store's weights were rounded to, "" for a store in floats and for a checkpoint."""
    if not (model / MANIFEST).is_file():
        return ""
    found = lossy_formats(read_manifest(model)).split("+")
    return "+".join(name for name in found if name not in _FLOATS)


def describe(manifest: Manifest, receipts: Sequence[Receipt]) -> str:
    """E.g. "w4g64+w8 gptq: KL 0.012, top-1 97.8 %, perplexity +0.4 % ± 0.1 against bf16 (8,000 predictions,
    measured 2026-11-30)".

    Of several receipts the newest one. Formats stand in the order of their bytes, and those that hold the
    source's values are named so. A store whose values are all the source's has lost nothing.
    """
    if not lossy_formats(manifest):
        return "lossless: all values are those of the source"
    name = " ".join(part for part in (formats_in_words(manifest), methods(manifest)) if part)
    if not receipts:
        return f"{name}: {UNMEASURED}"
    return f"{name}: {measured(receipts[-1])}"


def measured(receipt: Receipt) -> str:
    """One receipt's figures and where they come from."""
    figures = f"KL {receipt.kl_mean:.2g}, top-1 {100 * receipt.top1:.1f} %"
    change = f"perplexity {100 * receipt.change:+.1f} %{_error(receipt)}"
    seen = f"{receipt.predictions:,} predictions, measured {receipt.date}"
    return f"{figures}, {change} against {receipt.reference_formats} ({seen})"


def _error(receipt: Receipt) -> str:
    """The standard error of the change of perplexity, where it shows at the precision of the change."""
    error = f"{100 * receipt.change_error:.1f}"
    return "" if error == "0.0" else f" ± {error}"


def methods(manifest: Manifest) -> str:
    """How the codes were found, where it was not by plain rounding, and the numbers that were given for it.

    E.g. "gptq", "experts gptq, head awq", "smooth, alpha 0.5, clip 99.9".
    """
    given = {name: manifest.options.get(name) for name in ("alpha", "clip")}
    said = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    return ", ".join(filter(None, [_methods_by_part(manifest), *said]))


def _methods_by_part(manifest: Manifest) -> str:
    asked = manifest.options.get("methods", {})
    found = {part: name for part, name in asked.items() if name != "plain"} if isinstance(asked, dict) else {}
    names = set(found.values())
    if len(names) < 2:
        return "".join(names)
    return ", ".join(f"{part} {name}" for part, name in found.items())
