"""Every element of every tensor that transformers saves goes into the store exactly once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_models

from strata.model.resolve import Resolved, resolve
from strata.store.checkpoint import open_checkpoint
from strata.store.source import CheckpointSource, SourceRows

BIASES = ("gate_bias", "up_bias", "down_bias")


def sources_of(resolved: Resolved) -> list[SourceRows]:
    parts = [source for target in resolved.targets for source in target.sources]
    for expert in resolved.experts:
        parts += [expert.gate, expert.up, expert.down]
        parts += [bias for name in BIASES if (bias := getattr(expert, name)) is not None]
    return parts


def uses(source: CheckpointSource, resolved: Resolved) -> dict[str, np.ndarray]:
    """How often each element of each tensor is taken."""
    counts = {}
    for name, info in source.tensors.items():
        counts[name] = np.zeros((int(np.prod(info.shape[:-1])), info.shape[-1]), np.int32)
    for part in sources_of(resolved):
        rows = slice(part.start, part.stop, part.stride)
        cols = slice(part.col_start, part.col_stop, part.col_stride)
        block = counts[part.name][rows, cols]
        block += 1
        if part.row_order is not None:
            height = block.shape[1] if part.transposed else block.shape[0]
            assert sorted(part.row_order) == list(range(height))
    return counts


def check(folder: Path, elements: int) -> Resolved:
    source = open_checkpoint(folder)
    resolved = resolve(source.config, source.tensors, "safetensors")
    counts = uses(source, resolved)
    assert {name for name, taken in counts.items() if not (taken == 1).all()} == set()
    assert sum(taken.size for taken in counts.values()) == elements
    # Tensors of the store hold what their shapes say, so nothing is stacked twice either.
    assert sum(int(np.prod(t.shape)) for t in resolved.targets) + expert_elements(resolved) == elements
    return resolved


def expert_elements(resolved: Resolved) -> int:
    experts = resolved.spec.experts
    if experts is None:
        return 0
    each = 3 * resolved.spec.hidden * experts.width
    return len(resolved.experts) * (each + (2 * experts.width + resolved.spec.hidden) * experts.biases)


@pytest.mark.parametrize("case", small_models.CASES)
@pytest.mark.parametrize("original", [True, False], ids=["hub names", "names in memory"])
def test_every_element_is_used_once(case: str, original: bool, tmp_path: Path) -> None:
    model = small_models.build(case)
    model.save_pretrained(tmp_path, save_original_format=original)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    resolved = check(tmp_path, sum(t.numel() for t in state.values()))
    assert len({t.name for t in resolved.targets}) == len(resolved.targets)
    moe = [i for i in range(resolved.spec.layers) if resolved.spec.is_moe(i)]
    count = resolved.spec.experts.router.experts if resolved.spec.experts else 0
    assert [(e.layer, e.index) for e in resolved.experts] == [(i, e) for i in moe for e in range(count)]
