"""Write a GGUF of random weights in Qwen3-30B-A3B's layer shape, quantized so that a store keeps every bit.

Both engines of a comparison can read the same weights this way: Q4_0 matrices, a Q8_0 embedding and head, F32
norms and routers. The values mean nothing, but they are spread so that routing differs from token to token.

    python scripts/make_random_gguf.py --layers 10 --tokenizer smollm2.gguf --out /tmp/random-moe.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Values per Q4_0 and Q8_0 block, each with one fp16 scale before its codes."""
_CODE_BYTES = {"Q4_0": 16, "Q8_0": 32}
# Standard deviations of uniformly random codes: -8..7 and -128..127.
_CODE_SPREAD = {"Q4_0": 4.61, "Q8_0": 73.9}
_TOKENIZER_KEYS = ("tokens", "token_type", "merges")
_PIECE_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are Qwen3-30B-A3B's but for the number of layers."""

    layers: int = 10
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    width: int = 768


@dataclass(frozen=True)
class Tensor:
    """kind: "Q4_0", "Q8_0" or "F32". spread: standard deviation of the values; 0 = all ones."""

    name: str
    shape: tuple[int, ...]
    kind: str
    spread: float

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape in bytes of a quantized tensor; the last axis holds whole blocks."""
        return (*self.shape[:-1], self.shape[-1] // BLOCK * (2 + _CODE_BYTES[self.kind]))


def tensors(shape: Shape, vocab: int) -> Iterator[Tensor]:
    """All tensors in the order of the file. Shapes are [out, in], those of experts [expert, out, in]."""
    yield Tensor("token_embd.weight", (vocab, shape.hidden), "Q8_0", 0.5)
    yield Tensor("output_norm.weight", (shape.hidden,), "F32", 0.0)
    yield Tensor("output.weight", (vocab, shape.hidden), "Q8_0", 0.02)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        for norm, size in (("attn", shape.hidden), ("ffn", shape.hidden)):
            yield Tensor(f"{at}{norm}_norm.weight", (size,), "F32", 0.0)
        for norm in ("attn_q", "attn_k"):
            yield Tensor(f"{at}{norm}_norm.weight", (shape.head_dim,), "F32", 0.0)
        yield Tensor(f"{at}attn_q.weight", (queries, shape.hidden), "Q4_0", 0.02)
        yield Tensor(f"{at}attn_k.weight", (keys, shape.hidden), "Q4_0", 0.02)
        yield Tensor(f"{at}attn_v.weight", (keys, shape.hidden), "Q4_0", 0.02)
        yield Tensor(f"{at}attn_output.weight", (shape.hidden, queries), "Q4_0", 0.02)
        yield Tensor(f"{at}ffn_gate_inp.weight", (shape.experts, shape.hidden), "F32", 0.05)
        for part in ("gate", "up"):
            rows = (shape.experts, shape.width, shape.hidden)
            yield Tensor(f"{at}ffn_{part}_exps.weight", rows, "Q4_0", 0.02)
        yield Tensor(f"{at}ffn_down_exps.weight", (shape.experts, shape.hidden, shape.width), "Q4_0", 0.02)


def quantized(tensor: Tensor, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks, u8 of `byte_shape`: scales within 30 % of what gives the spread, any codes."""
    blocks = np.empty((int(np.prod(tensor.shape)) // BLOCK, 2 + _CODE_BYTES[tensor.kind]), np.uint8)
    scale = tensor.spread / _CODE_SPREAD[tensor.kind]
    for start in range(0, len(blocks), _PIECE_BLOCKS):
        piece = blocks[start : start + _PIECE_BLOCKS]
        scales = (scale * rng.uniform(0.7, 1.3, len(piece))).astype("<f2")
        piece[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        piece[:, 2:] = rng.integers(0, 256, (len(piece), _CODE_BYTES[tensor.kind]), np.uint8)
    if tensor.kind == "Q8_0":  # quantizers never write -128, and kernels may rely on it
        codes = blocks[:, 2:]
        codes[codes == 0x80] = 0x81
    return blocks.reshape(tensor.byte_shape)


def plain(tensor: Tensor, rng: np.random.Generator) -> NDArray[np.float32]:
    """Ones, or normal numbers of the tensor's spread."""
    if not tensor.spread:
        return np.ones(tensor.shape, np.float32)
    return rng.standard_normal(tensor.shape, np.float32) * np.float32(tensor.spread)


def write(out: Path, shape: Shape, tokenizer: Path, seed: int = 0) -> None:
    """The whole file, one tensor in memory at a time. tokenizer: a GGUF whose vocabulary is copied."""
    source = gguf.GGUFReader(tokenizer)
    writer = gguf.GGUFWriter(out, "qwen3moe")
    vocab = _copy_tokenizer(writer, source)
    _write_sizes(writer, shape, vocab)
    listed = list(tensors(shape, vocab))
    for tensor in listed:
        _declare(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for tensor in listed:
        writer.write_tensor_data(plain(tensor, rng) if tensor.kind == "F32" else quantized(tensor, rng))
    writer.close()


def _declare(writer: gguf.GGUFWriter, tensor: Tensor) -> None:
    if tensor.kind == "F32":
        size = 4 * int(np.prod(tensor.shape))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size)
        return
    kind = gguf.GGMLQuantizationType[tensor.kind]
    size = int(np.prod(tensor.byte_shape))
    writer.add_tensor_info(tensor.name, tensor.byte_shape, np.dtype(np.uint8), size, raw_dtype=kind)


def _copy_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> int:
    """Copies a byte-level BPE tokenizer; returns the number of its tokens."""
    found = {key: source.fields[f"tokenizer.ggml.{key}"].contents() for key in _TOKENIZER_KEYS}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(source.fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(found["tokens"])
    writer.add_token_types(found["token_type"])
    writer.add_token_merges(found["merges"])
    for key in ("bos", "eos"):
        getattr(writer, f"add_{key}_token_id")(source.fields[f"tokenizer.ggml.{key}_token_id"].contents())
    writer.add_add_bos_token(False)
    return len(found["tokens"])


def _write_sizes(writer: gguf.GGUFWriter, shape: Shape, vocab: int) -> None:
    writer.add_name("random-moe")
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_expert_feed_forward_length(shape.width)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a GGUF with a byte-level BPE tokenizer"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.layers < 1:
        parser.error(f"--layers is {options.layers}, at least 1 is needed")
    write(options.out, Shape(layers=options.layers), options.tokenizer, options.seed)


if __name__ == "__main__":
    main()
