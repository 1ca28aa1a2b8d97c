"""Quantized weights in safetensors: FP8 with block scales, and gpt-oss's MXFP4 pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.errors import FileFormatError, IncompleteError, UnsupportedError
from strata.store.checkpoint_file import DOWNLOAD_AGAIN, CheckpointFile, listed, shown
from strata.store.gguf_blocks import half_of_e8m0, widen_bf16
from strata.store.safetensors_parse import StoredTensor

Placed = tuple[StoredTensor, CheckpointFile]
FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_OTHER_SOURCE = "use the BF16 or the GGUF version of this model"


def _e4m3_table() -> NDArray[np.float32]:
    """OCP FP8 E4M3 (the "fn" variant: no infinities, 0x7F is NaN) by code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


E4M3_TO_F32 = _e4m3_table()


def floats(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.float32] | None:
    """Bytes of a float dtype as flat f32; None for integers and packed types."""
    if dtype == "F32":
        return data.view("<f4")
    if dtype == "BF16":
        return widen_bf16(data)
    if dtype in ("F16", "F64"):
        with np.errstate(over="ignore"):  # an Inf is found by the converter
            return data.view("<f2" if dtype == "F16" else "<f8").astype(np.float32)
    if dtype == FP8:
        return E4M3_TO_F32[data]
    if dtype == "F8_E8M0":
        return half_of_e8m0(data) * np.float32(2)
    return None


def check_method(config: Mapping[str, Any], producer: Any, where: str) -> tuple[int, int] | None:
    """The FP8 block size [rows, cols] of config.json, None when there is none.

    producer: `quantization` of ModelOpt's hf_quant_config.json, which older exports have instead.
    Raises UnsupportedError naming any other quantization method.
    """
    quantization = _quantization(config)
    if quantization is None and isinstance(producer, dict) and producer.get("quant_algo"):
        quantization = {**producer, "quant_method": "modelopt"}
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8" or quantization.get("quant_algo") not in (None, "FP8"):
        named = " ".join(shown(part) for part in (method, quantization.get("quant_algo", "")) if part != "")
        raise UnsupportedError(f"{where}: quantization method {named} is not supported", remedy=_OTHER_SOURCE)
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(b) is not int or b < 1 for b in block):
        raise UnsupportedError(
            f"{where}: FP8 needs weight_block_size [rows, cols], it is {shown(block)}", remedy=_OTHER_SOURCE
        )
    return block[0], block[1]


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or inner
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 matrix stack `[.., rows, cols]` and its scales `[.., rows / block, cols / block]`."""

    weight: Placed
    scale: Placed
    block: tuple[int, int]

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Flattened rows, each value multiplied (f32) by the scale of its block."""
        tensor, file = self.weight
        per_matrix, cols = tensor.shape[-2:]
        data = file.read(tensor.offset + start * cols, (stop - start) * cols)
        values = E4M3_TO_F32[data].reshape(stop - start, cols)
        matrix, row = np.divmod(np.arange(start, stop), per_matrix)
        scale_rows = matrix * self.scale[0].shape[-2] + row // self.block[0]
        scales = self._scales()[scale_rows]
        with np.errstate(all="ignore"):
            for first in range(0, cols, self.block[1]):
                values[:, first : first + self.block[1]] *= scales[:, first // self.block[1], None]
        return values

    def _scales(self) -> NDArray[np.float32]:
        """All scales as f32 `[.., cols / block]`: 1/16384 of the weights, so read as a whole."""
        tensor, file = self.scale
        values = floats(tensor.dtype, file.read(tensor.offset, tensor.nbytes))
        assert values is not None  # fp8_weights let only _SCALE_DTYPES through
        return values.reshape(-1, tensor.shape[-1])


def fp8_weights(
    tensors: Mapping[str, Placed], block: tuple[int, int] | None, where: str
) -> dict[str, Fp8Weight]:
    """Every FP8 tensor with its `X_scale_inv`. Raises IncompleteError listing those without one."""
    names = [name for name, (tensor, _) in tensors.items() if tensor.dtype == FP8]
    if names and block is None:
        raise UnsupportedError(
            f"{where}: {shown(names[0])} is FP8, but config.json has no weight_block_size",
            remedy=_OTHER_SOURCE,
        )
    missing = [shown(name + SCALE_SUFFIX) for name in names if name + SCALE_SUFFIX not in tensors]
    if missing:
        raise IncompleteError(f"{where}: FP8 scales are missing: {listed(missing)}", remedy=DOWNLOAD_AGAIN)
    found = {}
    for name in names:
        assert block is not None
        scale = tensors[name + SCALE_SUFFIX]
        _check_scale(tensors[name][0], scale[0], block, where)
        found[name] = Fp8Weight(tensors[name], scale, block)
    return found


def _check_scale(weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], where: str) -> None:
    if len(weight.shape) < 2 or 0 in weight.shape:
        raise UnsupportedError(
            f"{where}: FP8 tensor {shown(weight.name)} is no matrix: {weight.shape}",
            remedy="take the model in BF16, or a GGUF file of it",
        )
    rows, cols = weight.shape[-2:]
    wanted = (*weight.shape[:-2], -(-rows // block[0]), -(-cols // block[1]))
    if scale.shape != wanted or scale.dtype not in _SCALE_DTYPES:
        raise FileFormatError(
            f"{where}: {shown(scale.name)} is {scale.dtype} {list(scale.shape)}; for blocks of {list(block)} "
            f"it must be a float tensor of shape {list(wanted)}"
        )


@dataclass(frozen=True)
class Mxfp4Weight:
    """`X_blocks` u8 `[.., groups, 16]` and `X_scales` u8 `[.., groups]` (E8M0), seen as `[.., groups * 32]`.

    In each byte the low nibble is the even, the high nibble the odd column.
    """

    blocks: Placed
    scales: Placed

    @property
    def shape(self) -> tuple[int, ...]:
        """`[.., rows, cols]`."""
        *lead, groups, _ = self.blocks[0].shape
        return (*lead, groups * 32)

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return self.blocks[0].nbytes + self.scales[0].nbytes

    def codes(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Flattened rows: E2M1 codes `[rows, cols]` and exponents `[rows, cols / 32]`."""
        tensor, file = self.blocks
        groups = tensor.shape[-2]
        packed = file.read(tensor.offset + start * groups * 16, (stop - start) * groups * 16)
        codes = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(stop - start, groups * 32)
        scale, scale_file = self.scales
        exponents = scale_file.read(scale.offset + start * groups, (stop - start) * groups)
        return codes, exponents.reshape(stop - start, groups)


def mxfp4_weights(tensors: Mapping[str, Placed], where: str) -> dict[str, Mxfp4Weight]:
    """The pairs, by their common name X. Raises IncompleteError listing halves without the other."""
    is_packed = {name for name, (t, _) in tensors.items() if name.endswith(BLOCKS) and t.dtype == "U8"}
    stems = sorted(name.removesuffix(BLOCKS) for name in is_packed)
    missing = [shown(stem + SCALES) for stem in stems if stem + SCALES not in tensors]
    if missing:
        raise IncompleteError(f"{where}: MXFP4 scales are missing: {listed(missing)}", remedy=DOWNLOAD_AGAIN)
    found = {}
    for stem in stems:
        pair = Mxfp4Weight(tensors[stem + BLOCKS], tensors[stem + SCALES])
        blocks, scales = pair.blocks[0], pair.scales[0]
        wrong = len(blocks.shape) < 3 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]
        if wrong or scales.dtype != "U8" or prod(blocks.shape) == 0 or stem in tensors:
            raise FileFormatError(
                f"{where}: {shown(stem)}: blocks {list(blocks.shape)} and {scales.dtype} scales "
                f"{list(scales.shape)} are no MXFP4 pair [.., groups, 16] and U8 [.., groups]"
            )
        found[stem] = pair
    return found
