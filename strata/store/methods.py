"""Methods of quantization by name, and which part of a model gets which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.errors import UsageError
from strata.store.formats import WeightFormat

Kind = Literal["awq", "smooth"]
PLAIN = "plain"
PARTS = ("experts", "shared", "head")


@dataclass(frozen=True)
class Method:
    """scaling: which factors of input channels are folded away. rounding: "plain" knows nothing of inputs,
    "nearest" weighs errors by their inputs when it searches scales, "gptq" has later columns make good."""

    scaling: Kind | None
    rounding: Literal["plain", "nearest", "gptq"]


METHODS: dict[str, Method] = {
    PLAIN: Method(None, "plain"),
    "gptq": Method(None, "gptq"),
    "awq": Method("awq", "nearest"),
    "smooth": Method("smooth", "nearest"),
    "awq+gptq": Method("awq", "gptq"),
    "smooth+gptq": Method("smooth", "gptq"),
}


def parse_methods(text: str) -> dict[str, str]:
    """ "gptq" -> that method for every part; "experts=gptq,shared=plain" -> those, otherwise unchecked.

    Raises UsageError for a part that has two methods.
    """
    if "=" not in text:
        return dict.fromkeys(PARTS, text)
    methods: dict[str, str] = {}
    for item in text.split(","):
        part, _, method = (piece.strip() for piece in item.partition("="))
        if part in methods:
            raise UsageError(
                f"{part} has two methods, {methods[part]} and {method}", remedy="name each part once"
            )
        methods[part] = method
    return methods


def check_methods(methods: dict[str, str]) -> None:
    """Raises UsageError for a part or a method that there is not."""
    for part, method in methods.items():
        if part not in PARTS:
            raise UsageError(f"method of part {part!r}", remedy=f"parts are {', '.join(PARTS)}")
        if method not in METHODS:
            raise UsageError(f"{part}: unknown method {method!r}", remedy=f"use {', '.join(METHODS)}")


def check_format(method: str, fmt: WeightFormat, name: str) -> None:
    """Raises UsageError where a method cannot make a quantized format."""
    if METHODS[method].rounding != "plain" and fmt.values == "e2m1":
        raise UsageError(
            f"{name}: {method} makes integers with a scale, {fmt.name} has none",
            remedy=f"choose w4g64 or w8 for it, or --method plain to have {fmt.name}",
        )
