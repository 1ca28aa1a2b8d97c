"""Weight formats and the byte layout of packed matrices: one definition for converter and kernels.

A matrix `[rows, cols]` (y = W x) is packed as **row blocks** of 16 rows. Rows are padded to a multiple
of 16, cols to a multiple of max(64, group). One row block holds, in this order:

1. `values`: for each **unit** of 64 columns, the quantized values of 16 rows x 64 columns;
2. `scales`: for each group of columns, 16 scales (one per row, row order);
3. `minimums`: the same shape as scales, only in formats with a minimum;
4. zero bytes up to a multiple of 64.

Values inside a unit:

- 4 bit (w4*, mxfp4; 512 bytes): 8 chunks of 64 bytes; chunk c covers columns 8c..8c+7; byte `4*row + j`
  holds column `8c + j` in its low and column `8c + 4 + j` in its high nibble (j = 0..3).
- 8 bit (w8*; 1024 bytes): 16 chunks of 64 bytes; chunk c covers columns 4c..4c+3; byte `4*row + j` is
  column `4c + j`, signed.
- 16 bit (bf16, f16; 2048 bytes): 32 chunks of 64 bytes; chunk c covers columns 2c, 2c+1; 16-bit word
  `2*row + j` is column `2c + j`.

What the values mean: w4g*: `scale * (q - 8)`; w4g*m: `scale * q + minimum`; mxfp4: `E2M1[q] * 2**(e - 127)`
with one E8M0 byte e per 32 columns; w8: `scale * q` with one f32 scale per row (a single group); w8g32:
`scale * q` with fp16 scales per 32 columns; scales of w4 are fp16. Padding columns hold the zero code
(8 for w4g*, 0 elsewhere); groups and rows that are all padding have scale and minimum 0.

The layout serves AVX2 (two 8-row halves of a chunk) and AVX-512/VNNI (one chunk), one token and many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROW_BLOCK = 16
UNIT_COLS = 64
BLOCK_ALIGN = 64
RECORD_ALIGN = 4096

ValueKind = Literal["int4", "e2m1", "int8", "bf16", "f16"]
VALUE_BITS: dict[ValueKind, int] = {"int4": 4, "e2m1": 4, "int8": 8, "bf16": 16, "f16": 16}


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix. group: columns that share a scale; 0 = the whole row (or no scale).

    scale_bytes: 0 (none), 1 (E8M0), 2 (fp16), 4 (f32). code: the number C++ knows the format by.
    """

    name: str
    code: int
    values: ValueKind
    group: int
    scale_bytes: int
    minimum: bool = False

    @property
    def col_align(self) -> int:
        """Columns are padded to a multiple of this."""
        return max(UNIT_COLS, self.group)

    @property
    def zero_code(self) -> int:
        """The stored value that stands in padding columns."""
        return 8 if self.values == "int4" and not self.minimum else 0


_ALL = (
    WeightFormat("bf16", 0, "bf16", 0, 0),
    WeightFormat("f16", 1, "f16", 0, 0),
    WeightFormat("w8", 2, "int8", 0, 4),
    WeightFormat("w8g32", 3, "int8", 32, 2),
    WeightFormat("w4g32", 4, "int4", 32, 2),
    WeightFormat("w4g64", 5, "int4", 64, 2),
    WeightFormat("w4g128", 6, "int4", 128, 2),
    WeightFormat("w4g32m", 7, "int4", 32, 2, True),
    WeightFormat("w4g64m", 8, "int4", 64, 2, True),
    WeightFormat("w4g128m", 9, "int4", 128, 2, True),
    WeightFormat("mxfp4", 10, "e2m1", 32, 1),
)
FORMATS: dict[str, WeightFormat] = {f.name: f for f in _ALL}


def padded(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return (n + multiple - 1) // multiple * multiple


@dataclass(frozen=True)
class PackedShape:
    """Byte arithmetic of one packed matrix; rows and cols are the logical (unpadded) sizes."""

    format: WeightFormat
    rows: int
    cols: int

    @property
    def padded_rows(self) -> int:
        """Rows including the zero rows of the last block."""
        return padded(self.rows, ROW_BLOCK)

    @property
    def padded_cols(self) -> int:
        """Columns including the zero columns of the last unit or group."""
        return padded(self.cols, self.format.col_align)

    @property
    def groups(self) -> int:
        """Scales per row (0 when the format has none)."""
        if self.format.scale_bytes == 0:
            return 0
        return self.padded_cols // self.format.group if self.format.group else 1

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of one row block."""
        return ROW_BLOCK * self.padded_cols * VALUE_BITS[self.format.values] // 8

    @property
    def scale_block_bytes(self) -> int:
        """Bytes of the scales (equally: of the minimums) of one row block."""
        return ROW_BLOCK * self.groups * self.format.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Stride from one row block to the next."""
        parts = self.value_bytes + self.scale_block_bytes * (2 if self.format.minimum else 1)
        return padded(parts, BLOCK_ALIGN)

    @property
    def blocks(self) -> int:
        """Row blocks of 16 rows."""
        return self.padded_rows // ROW_BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class PackedTensor:
    """A packed matrix of the store: `data` is its bytes, u8 `[shape.nbytes]`, a view of the mapping."""

    name: str
    shape: PackedShape
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class ExpertLayout:
    """The record of one expert: for each slice its gate_up and down matrix, then the biases.

    hidden, width: model width and intermediate size. A slice takes `width / slices` of the
    intermediate dimension (a multiple of the group, or slices is 1). gate_up is one matrix of
    `2 * slice_width` rows whose row blocks hold 8 gate rows and then the 8 up rows of the same index
    (slice_width is padded to a multiple of 8 with zero rows), so that SwiGLU needs one row block only.
    down is `[hidden, slice_width]`; the slices' results add up. Biases (gpt-oss) are f32: gate_up in the
    interleaved order, slice after slice, then down `[hidden]`. Every part starts 64-byte aligned and the
    record is padded to 4 KiB.
    """

    gate_up_format: WeightFormat
    down_format: WeightFormat
    hidden: int
    width: int
    slices: int
    biases: bool

    @property
    def slice_width(self) -> int:
        """Intermediate elements in one slice."""
        return self.width // self.slices

    @property
    def gate_up(self) -> PackedShape:
        """The interleaved gate and up matrix of one slice."""
        return PackedShape(self.gate_up_format, 2 * padded(self.slice_width, 8), self.hidden)

    @property
    def down(self) -> PackedShape:
        """The down matrix of one slice."""
        return PackedShape(self.down_format, self.hidden, self.slice_width)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice: gate_up, then down."""
        return self.gate_up.nbytes + self.down.nbytes

    def gate_up_offset(self, part: int) -> int:
        """Byte offset of slice `part`'s gate_up inside the record."""
        return part * self.slice_bytes

    def down_offset(self, part: int) -> int:
        """Byte offset of slice `part`'s down inside the record."""
        return part * self.slice_bytes + self.gate_up.nbytes

    @property
    def gate_up_bias_offset(self) -> int:
        """Byte offset of the interleaved gate and up biases."""
        return self.slices * self.slice_bytes

    @property
    def down_bias_offset(self) -> int:
        """Byte offset of the down bias."""
        return self.gate_up_bias_offset + padded(self.slices * self.gate_up.rows * 4, BLOCK_ALIGN)

    @property
    def payload_bytes(self) -> int:
        """Bytes in use, before padding to RECORD_ALIGN."""
        if not self.biases:
            return self.slices * self.slice_bytes
        return self.down_bias_offset + self.hidden * 4

    @property
    def record_bytes(self) -> int:
        """Bytes of a record: the payload, padded to RECORD_ALIGN."""
        return padded(self.payload_bytes, RECORD_ALIGN)


def expert_slices(width: int, down_format: WeightFormat, wanted: int) -> int:
    """How many slices `width` can really be cut into: `wanted`, or 1 when groups would be cut."""
    return wanted if width % (wanted * down_format.col_align) == 0 else 1
