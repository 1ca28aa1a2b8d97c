"""The tensor types of GGUF files: id, name, block size (ggml's enum ggml_type and its block structs)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """values: elements per block; nbytes: bytes per block."""

    id: int
    name: str
    values: int
    nbytes: int


_K = 256  # super-block of the K and IQ types
_TABLE = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", _K, 84),
    (11, "Q3_K", _K, 110),
    (12, "Q4_K", _K, 144),
    (13, "Q5_K", _K, 176),
    (14, "Q6_K", _K, 210),
    (15, "Q8_K", _K, 292),
    (16, "IQ2_XXS", _K, 66),
    (17, "IQ2_XS", _K, 74),
    (18, "IQ3_XXS", _K, 98),
    (19, "IQ1_S", _K, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", _K, 110),
    (22, "IQ2_S", _K, 82),
    (23, "IQ4_XS", _K, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", _K, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", _K, 54),
    (35, "TQ2_0", _K, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)
TYPES_BY_ID: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _TABLE}
TYPES: dict[str, GgmlType] = {t.name: t for t in TYPES_BY_ID.values()}

# Ids that ggml once used and took away; named so that the error can say what the file holds.
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
