"""Defects to plant in the tensor-core kernels for many tokens, as in `mutants.TABLE`."""

from __future__ import annotations

PREFILL_TABLE: list[tuple[str, str, str, str]] = [
    ("linear_prefill", "", "row >= result.rows", "row > result.rows"),
    ("linear_prefill", "", "token < result.tokens", "token <= result.tokens"),
    ("linear_prefill", "", "rows % 2 != 0", "false"),
    ("linear_prefill", "", "row + 1 < rows) put", "row + 1 <= rows) put"),
    ("linear_prefill", "", "sums[tile][i + 2] + bias.y", "sums[tile][i + 1] + bias.y"),
    ("linear_prefill", "", "row_block * kRowBlock < result.rows", "row_block * kRowBlock <= result.rows"),
    ("linear_prefill", "", "blockIdx.x * Stage::kTokens", "0"),
    ("linear_prefill", "", "2 * lane.group, lane)", "lane.group, lane)"),
    ("linear_prefill", "", "totals + head * units * kTotalsBytes", "totals"),
    ("linear_prefill", "prefill.cuh", "rounded_up(rows.count, kTokensAtOnce)", "rows.count"),
    ("linear_prefill", "prefill.cuh", "(chunk ^ token % 8) * 16, x.values", "chunk * 16, x.values"),
    (
        "linear_prefill",
        "prefill.cuh",
        "copy_async_wait<kPrefillStages - 2>",
        "copy_async_wait<kPrefillStages - 1>",
    ),
    (
        "linear_prefill",
        "prefill.cuh",
        "stages.copy(x, rows, unit + kPrefillStages - 1)",
        "stages.copy(x, rows, unit + kPrefillStages)",
    ),
    ("linear_prefill", "prefill.cuh", "__syncthreads(); // the unit's", "// the unit's"),
    ("linear_prefill", "prefill.cuh", "half * 4 + lane / 8", "half * 2 + lane / 8"),
    ("linear_prefill", "prefill.cuh", "tile / 2 * kTokensAtOnce >= used", "tile * kTokensAtOnce >= used"),
    ("linear_prefill", "prefill.cuh", "kParts == 1 ? 2 : part", "part"),
    ("linear_prefill", "prefill.cuh", "(i % 2 ? totals.y : totals.x)", "totals.x"),
    ("linear_prefill", "prefill.cuh", "unit % kPrefillStages * kBytes", "unit % 2 * kBytes"),
    ("linear_prefill", "prefill.cuh", "{b[2 * i], b[2 * i + 1]}", "{b[2 * i + 1], b[2 * i]}"),
    ("linear_prefill", "prefill.cuh", "if (unit + 1 < units)", "if (unit + 1 <= units)"),
    ("linear_prefill", "prefill.cuh", "numbers[2 * half + i], pair", "numbers[i], pair"),
    (
        "linear_prefill",
        "prefill.cuh",
        "sums[tile][i] *= i < 2 ? scale.x : scale.y",
        "sums[tile][i] *= scale.x",
    ),
    ("pack_activations", "", "__shfl_xor_sync(FULL, own, 2)", "__shfl_xor_sync(FULL, own, 1)"),
    ("pack_activations", "", "valid && threadIdx.x % 8 == 0", "threadIdx.x % 8 == 0"),
    ("pack_activations", "", "column < columns", "column <= columns"),
    ("pack_activations", "", "pack_bf16(first.x, first.z)", "pack_bf16(first.x, first.y)"),
    ("pack_activations", "packed_rows.cuh", "column / 32 * 4 + pair", "column / 32 * 2 + pair"),
]
