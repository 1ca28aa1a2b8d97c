"""What each way to keep keys and values costs: text that was written over BF16, foreseen over all others.

The text is the model's own, sampled, so that its perplexity is what the model is used to, at the beginning
and far behind it, where errors of the cache have had time to add up. All walk the same tokens (teacher
forcing); results do not depend on how a text is cut into steps, so these are the logits of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import KvSpec, group_of
from strata.backends.cpu_kv import CpuKvCache
from strata.core import KvDtype
from strata.engine.perplexity import Comparison, Predictions, Score, compare, predictions
from strata.model.decoder import Decoder

TRUTH: KvDtype = "bf16"
VARIANTS: tuple[KvDtype, ...] = (TRUTH, "f32", "int8t", "int8", "int8g128", "int8g64", "int8g32")
"""All ways to keep KV that are compared, the truth first."""
_LARGEST_CODE = 127
Steps = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class KvText:
    """Token ids: what was given, then what the model wrote."""

    prompt: Sequence[int]
    written: Sequence[int]


@dataclass(frozen=True)
class KvResult:
    """A cache beside a BF16 one on the written text. token_bytes: of one token's KV over all layers, whole
    pages shared out."""

    dtype: KvDtype
    token_bytes: float
    figures: Comparison

    def part(self, tokens: slice) -> Comparison:
        """Of some of the written tokens."""
        return _cut(self.figures, tokens)


def kv_variants(spec: KvSpec) -> list[KvDtype]:
    """The ways to keep a model's KV that differ: a group as large as a head is the head's scale."""
    widest = max(spec.key_dim, spec.value_dim)
    return [dtype for dtype in VARIANTS if group_of(dtype) < widest]


def compare_kv(decoder: Decoder, text: KvText, page_tokens: int) -> list[KvResult]:
    """Every variant beside BF16. The decoder's backend is the `cpu`."""
    truth = KvSpec.of(decoder.spec, page_tokens, TRUTH)
    steps = tensor_steps(decoder, text.prompt, page_tokens)
    specs = {
        dtype: KvSpec.of(decoder.spec, page_tokens, dtype, steps if dtype == "int8t" else ())
        for dtype in kv_variants(truth)
    }
    window = [*text.prompt, *text.written]
    walks = {str(dtype): _walk(decoder, window, spec) for dtype, spec in specs.items()}
    found = compare(_walk(decoder, window, truth), walks)
    written = slice(len(text.prompt) - 1, None)
    return [
        KvResult(dtype, spec.page_bytes / page_tokens, _cut(found[dtype], written))
        for dtype, spec in specs.items()
    ]


def tensor_steps(decoder: Decoder, prompt: Sequence[int], page_tokens: int) -> Steps:
    """The scales of int8t: per layer, the largest key and value element of the prompt over 127.

    Fixed from then on, as a calibrated scale is: what is larger later will be clipped.
    """
    spec = KvSpec.of(decoder.spec, page_tokens, "bf16")
    cache = decoder.backend.kv_cache(spec, -(-len(prompt) // page_tokens))
    for _ in predictions(decoder, [[*prompt, 0]], "bf16", page_tokens=page_tokens, cache=cache):
        pass
    return tuple(_largest(cache, layer) for layer in range(spec.layers))


def _walk(decoder: Decoder, window: Sequence[int], spec: KvSpec) -> Iterator[Predictions]:
    cache = decoder.backend.kv_cache(spec, -(-len(window) // spec.page_tokens))
    return predictions(decoder, [window], spec.dtype, page_tokens=spec.page_tokens, cache=cache)


def _cut(whole: Comparison, tokens: slice) -> Comparison:
    return Comparison(
        Score(whole.reference.losses[tokens]),
        Score(whole.score.losses[tokens]),
        whole.divergences[tokens],
        whole.same_top[tokens],
    )


def _largest(cache: CpuKvCache, layer: int) -> tuple[float, float]:
    """Of a layer of BF16 pages, as steps. A page begins as zeros: what holds no token does not count."""
    spec = cache.spec
    size, keys = spec.layer_bytes, replace(spec, value_in_key=True).layer_bytes
    blocks = [cache.page(i)[layer * size : (layer + 1) * size] for i in range(cache.pages)]
    values = blocks if spec.value_in_key else [block[keys:] for block in blocks]
    return _step([block[:keys] for block in blocks]), _step(values)


def _step(blocks: Sequence[NDArray[np.uint8]]) -> float:
    """Bytes of BF16 -> the largest element over 127. Without their sign bits BF16 order like integers."""
    largest = max(int((block.view(np.uint16) & np.uint16(0x7FFF)).max()) for block in blocks)
    return float(np.array([largest << 16], np.uint32).view(np.float32)[0]) / _LARGEST_CODE
