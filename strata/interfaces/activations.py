"""What the processor's products read, and the stores that were made for a scale per token.

The rule: `int8` unless something else is asked for, of smoothed stores as well. A scale per token makes
prompts a few percent faster and, smoothed or not, loses as much as a scale per 64 columns or more
(docs/quantization.md has the figures): not for a program to choose.
"""

from __future__ import annotations

from strata.config import Config
from strata.store.manifest import Manifest
from strata.store.methods import METHODS

SMOOTHED = "smoothed for a scale per token: --set backend.activations=int8_per_token (int8 is the default)"


def describe(config: Config) -> str:
    """In words, for the beginning of a run; "" for the default."""
    asked = config.backend.activations
    return "" if asked == "int8" else f"{asked} ({config.where('backend.activations')})"


def smoothed(manifest: Manifest) -> bool:
    """Whether all matrices of the layers are in w8, and were smoothed ("smooth", "smooth+gptq")."""
    layers = {name: one for name, one in manifest.tensors.items() if name.startswith("layers.")}
    formats = {one.format for one in layers.values() if not one.plain}
    formats |= {fmt for one in manifest.layers.values() for fmt in (one.gate_up, one.down)}
    methods = manifest.options.get("methods")
    if not isinstance(methods, dict) or formats != {"w8"}:
        return False
    parts = ("shared", "experts") if manifest.layers else ("shared",)
    asked = {str(methods.get(part)) for part in parts}
    return all(name in METHODS and METHODS[name].scaling == "smooth" for name in asked)
