"""What a conversion is asked for, and which format each part gets."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from strata.errors import UsageError
from strata.store.clipping import check_clip
from strata.store.formats import FORMATS, WeightFormat
from strata.store.methods import METHODS, PLAIN, check_format, check_methods

AUTO = "auto"
DEFAULT_FORMATS = {"experts": "w4g64", "shared": "w4g128", "head": "w8", "embed": "w8"}
_ATTENTION = ("qkv", "out", "q", "q_a", "q_b", "kv_a", "k_b", "v_b")
_FFN = ("mlp.gate_up", "mlp.down", "shared_expert.gate_up", "shared_expert.down")
_LAYERED = ("experts", "shared", *(f"attn.{name}" for name in _ATTENTION), *_FFN)
"""What formats of single layers are asked of: parts, and matrices of the part "shared"."""
_NEAR_LOSSLESS = "w8g32"  # for block types of more than four bits that no format holds exactly
_FINE_TYPES = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_1", "Q8_K"})


@dataclass(frozen=True)
class ConvertOptions:
    """Formats by part. "auto": what the source has, where a format holds it exactly, else DEFAULT_FORMATS.

    keep_quantized False: "auto" never keeps the source's quantization. slices: parts that an expert's
    width is cut into. allow_nan: NaN and Inf become 0 and are counted in the manifest. overrides: formats
    of single layers, {"experts.0-3": "bf16", "shared.47": "w8", "mlp.down.47": "bf16"}. exact: where "auto"
    keeps nothing, it is f16 for F16 and bf16 for all else instead of DEFAULT_FORMATS: what others are
    measured against.
    budget: where formats were chosen for a number of bytes: that number, and what each choice costs.
    methods: how parts are rounded, {"experts": "gptq"} (see methods.py; plain where not named); act_order:
    gptq takes the columns with the largest inputs first; alpha: of awq and smooth, instead of a search;
    searched: what every alpha of a grid gave, where it was found by one.
    stats: the digest of the statistics that they use. clip: rows of w8 are cut off above this percentile (see
    clipping.py), except by gptq, which finds its own scales; None: nothing is.
    force replaces an existing store; threads (0: one per processor, 4 at most) changes nothing in the result.
    """

    experts: str = AUTO
    shared: str = AUTO
    head: str = AUTO
    embed: str = AUTO
    slices: int = 2
    allow_nan: bool = False
    keep_quantized: bool = True
    exact: bool = False
    overrides: dict[str, str] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    act_order: bool = True
    alpha: float | None = None
    searched: dict[str, Any] = field(default_factory=dict)
    stats: str = ""
    clip: float | None = None
    force: bool = False
    threads: int = 0

    def __post_init__(self) -> None:
        for part in DEFAULT_FORMATS:
            _check_format(part, getattr(self, part))
        for key, value in self.overrides.items():
            _check_format(key, value)
            parse_override(key)
        check_methods(self.methods)
        check_clip(self.clip)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UsageError(
                f"alpha is {self.alpha:g}", remedy="use 0 (only weights count) to 1 (only inputs)"
            )
        self._check_idle()
        if not 1 <= self.slices <= 64:
            raise UsageError(f"slices is {self.slices}", remedy="use 1 to 64; one per memory node is right")

    def _check_idle(self) -> None:
        """UsageError for what only a method knows, where no part has such a method."""
        found = ", ".join(f"{part}={method}" for part, method in self.methods.items()) or "none is asked for"
        if self.alpha is not None and not self.scaled:
            raise UsageError(
                f"alpha is {self.alpha:g}, which is of the methods awq and smooth: {found}",
                remedy="add --method smooth, or awq, or leave --alpha out",
            )
        if not self.act_order and not self.factored:
            raise UsageError(
                f"the order of columns (--no-act-order) is of the method gptq: {found}",
                remedy="add --method gptq, or leave --no-act-order out",
            )

    def wanted(self, part: str, layer: int | None, matrix: str = "") -> str:
        """The format asked for `part` ("experts", "shared", "head", "embed") of a layer, or "auto".

        matrix: which of the part's, e.g. "mlp.down"; what was said of it alone counts before its part's.
        """
        for asked_of in (matrix, part):
            for key, value in self.overrides.items():
                name, first, last = parse_override(key)
                if layer is not None and name == asked_of and first <= layer <= last:
                    return value
        asked: str = getattr(self, part)
        return asked

    def method(self, part: str) -> str:
        """The method of a part; the embedding's is plain."""
        return self.methods.get(part, PLAIN)

    def clips(self, part: str) -> bool:
        """Whether the rounding of a part is clipped where it is in w8."""
        return self.clip is not None and METHODS[self.method(part)].rounding != "gptq"

    @property
    def calibrated(self) -> bool:
        """Whether a part has a method that needs statistics."""
        return any(method != PLAIN for method in self.methods.values())

    @property
    def factored(self) -> bool:
        """Whether a part has a method that needs second moments."""
        return any(METHODS[method].rounding == "gptq" for method in self.methods.values())

    @property
    def scaled(self) -> bool:
        """Whether a part has a method that folds factors away."""
        return any(METHODS[method].scaling is not None for method in self.methods.values())

    def identity(self) -> dict[str, Any]:
        """The options that decide what the bytes of the store are."""
        data = dataclasses.asdict(self)
        del data["force"], data["threads"]
        if not self.exact:
            del data["exact"]  # what was converted before there was a choice keeps its name
        if not self.budget:
            del data["budget"]
        if not self.searched:
            del data["searched"]
        if self.clip is None:
            del data["clip"]
        if not self.calibrated:
            for name in ("methods", "act_order", "alpha", "stats"):
                del data[name]
        return data


def _check_format(key: str, value: str) -> None:
    if value != AUTO and value not in FORMATS:
        raise UsageError(f"{key}: unknown weight format {value!r}", remedy=f"use auto, {', '.join(FORMATS)}")


def parse_override(key: str) -> tuple[str, int, int]:
    """ "experts.0-3" -> ("experts", 0, 3): what, first and last layer. UsageError for anything else."""
    found = re.fullmatch(r"([a-z_.]+)\.([0-9]{1,6})(?:-([0-9]{1,6}))?", key)
    first, last = (int(found[2]), int(found[3] or found[2])) if found else (1, 0)
    if found is None or found[1] not in _LAYERED or last < first:
        raise UsageError(
            f"override {key!r} names no layers",
            remedy=f"write e.g. experts.0-3 or mlp.down.47, first layer 0; there are {', '.join(_LAYERED)}",
        )
    return found[1], first, last


@dataclass(frozen=True)
class Choice:
    """The format of one matrix. kept: the source's own codes are copied; note: why not what was meant."""

    format: WeightFormat
    kept: bool = False
    note: str = ""


def choose(
    options: ConvertOptions,
    part: str,
    layer: int | None,
    kept: set[str | None],
    types: set[str],
    matrix: str = "",
) -> Choice:
    """Format of a matrix whose sources have dtypes `types` and could be kept as `kept` (None: not at all).

    A part with a method of its own is rounded anew, whatever the source has. matrix: as `wanted` has it.
    """
    asked = options.wanted(part, layer, matrix)
    if options.method(part) != PLAIN:
        choice = Choice(FORMATS[DEFAULT_FORMATS[part] if asked == AUTO else asked])
        check_format(options.method(part), choice.format, part)
        return choice
    same = next(iter(kept)) if len(kept) == 1 else None
    if asked != AUTO:
        return Choice(FORMATS[asked], kept=same == asked)
    default = FORMATS[DEFAULT_FORMATS[part]]
    if not options.keep_quantized:
        return Choice(default)
    if same is not None:
        return Choice(FORMATS[same], kept=True)
    if options.exact:
        return Choice(FORMATS["f16" if types == {"F16"} else "bf16"])
    if types & _FINE_TYPES or kept != {None}:
        note = f"{'/'.join(sorted(types))} is not held exactly by any format: requantized to {_NEAR_LOSSLESS}"
        return Choice(FORMATS[_NEAR_LOSSLESS], note=note)
    return Choice(default)
