"""Write a Hugging Face checkpoint of random weights in the shape of a qwen3_moe config.json.

For tests at full size: memory of a conversion, kill and resume, start-up time. One safetensors file per
layer plus one for embeddings and head, BF16. Values repeat a block of 16 M normal numbers, so that
gigabytes are written at disk speed; they mean nothing. With --real-experts N all but the first N experts of a
layer are holes in the files: they read as zeros and take no room, so that a checkpoint larger than the disk
can be tried.

    python scripts/make_random_checkpoint.py --config config.json --layers 4 --out /tmp/random-moe
    python scripts/make_random_checkpoint.py --config config.json --real-experts 8 --out /tmp/sparse-moe
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_POOL_VALUES = 16 << 20
_PIECE_VALUES = 4 << 20
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
Tensors = dict[str, tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="config.json of a qwen3_moe model")
    parser.add_argument("--layers", type=int, help="write only so many layers")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files are copied along")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--real-experts", type=int, metavar="N", help="the others are holes [all are real]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    if config.get("model_type") != "qwen3_moe":
        parser.error(f"{arguments.config}: model_type is {config.get('model_type')!r}, not 'qwen3_moe'")
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    write_checkpoint(arguments.out, config, arguments.seed, arguments.real_experts)
    for name in _TOKENIZER_FILES if arguments.tokenizer else ():
        if (arguments.tokenizer / name).exists():
            shutil.copy(arguments.tokenizer / name, arguments.out / name)


def write_checkpoint(out: Path, config: dict[str, Any], seed: int, real_experts: int | None = None) -> None:
    """config.json, one safetensors file per group of tensors, and the index. real_experts: see above."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    pool = _pool(seed)
    groups = [_outer(config), *(_layer(config, i) for i in range(config["num_hidden_layers"]))]
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(out / file, tensors, pool, number, real_experts)
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(2 * int(np.prod(shape)) for group in groups for shape in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def _outer(config: dict[str, Any]) -> Tensors:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors: Tensors = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def _layer(config: dict[str, Any], index: int) -> Tensors:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: Tensors = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate.weight": (config["num_experts"], hidden),
    }
    width = config["moe_intermediate_size"]
    for expert in range(config["num_experts"]):
        tensors[f"mlp.experts.{expert}.gate_proj.weight"] = (width, hidden)
        tensors[f"mlp.experts.{expert}.up_proj.weight"] = (width, hidden)
        tensors[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    return {f"model.layers.{index}.{name}": shape for name, shape in tensors.items()}


def _pool(seed: int) -> NDArray[np.uint16]:
    """Normal numbers of standard deviation 0.02 as bf16 bit patterns (cut, not rounded)."""
    values = np.random.default_rng(seed).standard_normal(_POOL_VALUES, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _write_file(
    path: Path, tensors: Tensors, pool: NDArray[np.uint16], seed: int, real_experts: int | None
) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            if _is_hole(name, real_experts):
                file.seek(2 * int(np.prod(shape)), os.SEEK_CUR)
                continue
            for piece in _pieces(name, int(np.prod(shape)), pool, rng):
                file.write(piece.data)
        file.truncate()


def _is_hole(name: str, real_experts: int | None) -> bool:
    """Whether a tensor is of an expert that is not written."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return found is not None and real_experts is not None and int(found[1]) >= real_experts


def _pieces(
    name: str, count: int, pool: NDArray[np.uint16], rng: np.random.Generator
) -> Iterator[NDArray[np.uint16]]:
    """Norm weights are ones, everything else runs of the pool from random places."""
    if name.endswith(("norm.weight",)):
        yield np.full(count, 0x3F80, np.uint16)
        return
    while count:
        size = min(count, _PIECE_VALUES)
        start = int(rng.integers(0, _POOL_VALUES - size + 1))
        yield pool[start : start + size]
        count -= size


if __name__ == "__main__":
    main()
