"""The demo model as a Hugging Face checkpoint in bf16 whose weights lie on no 4-bit grid.

    python scripts/demo_checkpoint.py --out /tmp/demo-bf16

The demo ships in 4 bits, which its training rounded to: quantizing it again would lose and show nothing. Here
every channel between two matrices is scaled by a random factor in the one and by its inverse in the other
(norms and what reads them, values and output, up and down), which changes no output beyond the rounding to
bf16. Factors are log-normal (sigma 0.35), and 2 % of the norms' channels 16 times larger: trained models have
such outliers in their activations. With --expert-outliers as many channels inside every expert are made
larger, too: others in each, so that what one expert reads says nothing about another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from strata.core import ExpertId
from strata.interfaces.bundled import model_path
from strata.store import names
from strata.store.pack import unpack
from strata.store.reader import Store

F32 = NDArray[np.float32]
SIGMA, OUTLIERS, OUTLIER = 0.35, 0.02, 16.0
_BLOCK = 8  # rows of gate, then of up: formats.ExpertLayout
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


class Scales:
    """Random factors, always the same."""

    def __init__(self, seed: int, size: float, *, expert_outliers: bool = False) -> None:
        self._random = np.random.default_rng(seed)
        self._size = size
        self._expert_outliers = expert_outliers

    def channels(self, count: int) -> F32:
        """Log-normal."""
        return np.exp(self._size * SIGMA * self._random.standard_normal(count)).astype(np.float32)

    def norm(self, count: int) -> F32:
        """The same with outliers."""
        found = self.channels(count)
        chosen = self._random.choice(count, max(1, round(OUTLIERS * count)), replace=False)
        found[chosen] *= OUTLIER**self._size
        return found

    def inner(self, count: int) -> F32:
        """Of an expert's intermediate vector."""
        return self.norm(count) if self._expert_outliers else self.channels(count)


def layer_tensors(store: Store, index: int, scales: Scales) -> dict[str, F32]:
    """One layer under Hugging Face's names."""
    spec, prefix = store.spec.attention, f"model.layers.{index}."

    def plain(part: str) -> F32:
        return store.plain(names.layer(index, part))

    attention, ffn = scales.norm(store.spec.hidden), scales.norm(store.spec.hidden)
    qkv = unpack(store.tensor(names.layer(index, "attn.qkv.weight"))) / attention
    out = unpack(store.tensor(names.layer(index, "attn.out.weight")))
    q, k, v = np.split(qkv, np.cumsum([spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim]))
    values = scales.channels(len(v)).reshape(spec.kv_heads, spec.head_dim)
    read = np.repeat(values, spec.heads // spec.kv_heads, axis=0).reshape(-1)
    return {
        prefix + "input_layernorm.weight": plain("attn_norm.weight") * attention,
        prefix + "post_attention_layernorm.weight": plain("ffn_norm.weight") * ffn,
        prefix + "self_attn.q_proj.weight": q,
        prefix + "self_attn.k_proj.weight": k,
        prefix + "self_attn.v_proj.weight": v * values.reshape(-1, 1),
        prefix + "self_attn.o_proj.weight": out / read,
        prefix + "self_attn.q_norm.weight": plain("attn.q_norm.weight"),
        prefix + "self_attn.k_norm.weight": plain("attn.k_norm.weight"),
        prefix + "mlp.gate.weight": plain("router.weight") / ffn,
        **_experts(store, index, ffn, scales),
    }


def _experts(store: Store, index: int, norm: F32, scales: Scales) -> dict[str, F32]:
    found = {}
    for expert in range(store.manifest.expert_count):
        gate, up, down = expert_matrices(store, ExpertId(index, expert))
        inner = scales.inner(len(up))
        prefix = f"model.layers.{index}.mlp.experts.{expert}."
        found[prefix + "gate_proj.weight"] = gate / norm
        found[prefix + "up_proj.weight"] = up / norm * inner[:, None]
        found[prefix + "down_proj.weight"] = down / inner
    return found


def expert_matrices(store: Store, expert: ExpertId) -> tuple[F32, F32, F32]:
    """gate and up [width, hidden], down [hidden, width], put together from the record's slices."""
    gates, ups, downs = [], [], []
    for part in range(store.expert_layout(expert.layer).slices):
        gate_up, down = (unpack(packed) for packed in store.expert_part(expert, part))
        blocks = gate_up.reshape(-1, 2, _BLOCK, gate_up.shape[1])
        gates.append(blocks[:, 0].reshape(-1, gate_up.shape[1]))
        ups.append(blocks[:, 1].reshape(-1, gate_up.shape[1]))
        downs.append(down)
    return np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)


def write_checkpoint(out: Path, *, seed: int = 0, size: float = 1.0, expert_outliers: bool = False) -> Path:
    """The folder; size 0 leaves the weights where they are."""
    out.mkdir(parents=True)
    source, scales = model_path("demo"), Scales(seed, size, expert_outliers=expert_outliers)
    with Store.open(source) as store:
        tensors = {
            "model.embed_tokens.weight": unpack(store.tensor(names.EMBED)),
            "model.norm.weight": store.plain(names.FINAL_NORM),
        }
        for index in range(store.spec.layers):
            tensors |= layer_tensors(store, index, scales)
    rounded = {name: torch.from_numpy(np.ascontiguousarray(v)).bfloat16() for name, v in tensors.items()}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    for name in _FILES:
        shutil.copyfile(source / name, out / name)
    config = json.loads((out / "config.json").read_text()) | {"_name_or_path": "strata-demo-bf16"}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="of the factors' logarithms; 0: none [1]")
    parser.add_argument("--expert-outliers", action="store_true", help="inside of every expert, too")
    options = parser.parse_args()
    if options.out.exists():
        print(f"demo_checkpoint: {options.out} exists", file=sys.stderr)
        return 1
    chosen = {"seed": options.seed, "size": options.size, "expert_outliers": options.expert_outliers}
    print(write_checkpoint(options.out, **chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
