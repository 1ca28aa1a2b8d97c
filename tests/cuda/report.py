"""The table of docs/kernels.md: what each kernel moves, needs and should take on an RTX 3090.

    python tests/cuda/report.py            prints the table in Markdown

Nothing here was measured on a GPU. Registers and spills are ptxas' (NVRTC, sm_86). Sectors, wavefronts and
instructions are counted by the PTX simulation on a small launch whose work is multiplied up to the shape
named. The limit is the bytes that must move over the card's 936 GB/s; the prediction adds what the counts
say: sectors at 90 % of that bandwidth (what several blocks read: once, the others find it in L2), or the
issue of instructions at one per two cycles and scheduler, or 90 % of the tensor cores' rate, whichever is
longest. The start of a kernel (about 2 us, less inside a CUDA graph) is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cases_attention
import cases_embedding
import cases_experts
import cases_heads
import cases_linear
import cases_norm
import cases_norm_route
import cases_prefill
import cases_router
import cases_verify
import cases_wide
from cases import Prepared
from compiled import compiled, ptx_of
from gate import usage_of
from ptxsim.profile import SECTOR, Profile
from ptxsim.simulator import PtxSimulator

from strata.plan.spec import RouterSpec

# NVIDIA, "GA102 GPU architecture", RTX 3090.
BANDWIDTH, SMS, SCHEDULERS, CLOCK = 936e9, 82, 4, 1.695e9
PRODUCTS = 71e12 / 2
"""16-bit products per second, sums in f32."""
REACHABLE, ISSUE_RATE = 0.9, 0.5
"""Assumptions, not measurements: share of bandwidth and products, instructions per scheduler and cycle."""


@dataclass(frozen=True)
class Row:
    """make() is a launch that does 1 / times of the work of `shape`. must_move: bytes, of that work.

    again: blocks read what other blocks have brought into L2. products: that must be computed, where they are
    the limit (16-bit ones, four of 8 bits are one).
    """

    shape: str
    make: Callable[[], Prepared]
    times: float
    must_move: int
    again: bool = False
    products: float = 0.0


def _attention(dtype: str, tokens: int, kv_heads: int) -> Row:
    setup = cases_attention.Setup(dtype, 128, 8, 1, (512,), (0,), splits=2, joins=True)
    per_token = 2 * kv_heads * (128 + 4 if dtype == "int8" else 256)
    times = tokens // 512 * kv_heads
    shape = f"{dtype}, {8 * kv_heads} query and {kv_heads} KV heads of 128, {tokens:,} tokens"
    return Row(shape, lambda: cases_attention.decode(setup), times, tokens * per_token)


def _prompt(dtype: str, tokens: int, depth: int) -> Row:
    """A chunk of `tokens` behind `depth` others; what runs is a tile of eight tokens in its middle."""
    middle = depth + tokens // 2 - 4
    setup = cases_prefill.Setup(dtype, 128, 8, 1, ((middle, 8),), page_tokens=64)
    per_token = 2 * 4 * (128 + 4 if dtype == "int8" else 256)
    shape = f"{dtype}, 32 query and 4 KV heads of 128, a chunk of {tokens} tokens behind {depth:,}"
    return Row(
        shape, lambda: cases_prefill.prefill(setup), tokens // 8 * 4, (depth + tokens) * per_token, again=True
    )


def _latent(dtype: str, heads: int, tokens: int) -> Row:
    """Sixteen heads over 256 tokens are what runs."""
    setup = cases_wide.Setup(dtype, 576, 16, 1, ((255, 1),), splits=1)
    shape = f"{dtype}, {heads} query heads, latent of 512 + 64, {tokens:,} tokens"
    must_move = tokens * (576 + 4 if dtype == "int8" else 1152)
    return Row(
        shape, lambda: cases_wide.prepare(setup), tokens // 256 * heads // 16, must_move, again=heads > 16
    )


def _linear(fmt: str, rows: int, columns: int, tokens: int, bits: float, norm: bool = False) -> Row:
    small = 64
    shape = f"{fmt}, {rows:,} x {columns:,}, {tokens} token{'s' if tokens > 1 else ''}"
    shape += ", normed" if norm else ""
    per_block = 4 if tokens > 8 else 1
    return Row(
        shape,
        lambda: cases_linear.prepare(fmt, small, columns, tokens, per_block, False, False, norm),
        rows // small,
        int(rows * columns * bits / 8) + 4 * tokens * (rows + columns),
    )


def _experts(tokens: int) -> list[Row]:
    """Qwen3-30B-A3B: eight experts of 128, hidden 2,048, width 768."""
    gate_up = cases_experts.Setup("w4g64", 2048, 16, 1, (tokens,))
    down = cases_experts.Setup("w4g64", 32, 768, 1, (tokens,))
    weights = int(8 * 768 * 2048 * 4.25 / 8)
    name = f"w4g64, 8 experts of 2,048 x 768, {tokens} token{'s' if tokens > 1 else ''} each"
    return [
        Row(
            name,
            lambda: cases_experts.gate_up(gate_up),
            8 * 768 // 16,
            2 * weights + 8 * tokens * (2048 + 768) * 4,
        ),
        Row(name, lambda: cases_experts.down(down), 8 * 2048 // 32, weights + 8 * tokens * (2048 + 768) * 4),
    ]


HEADS = cases_heads.Setup("int8", 32, 4, 128, (5,), (0,))
ROWS = [
    Row(
        "1 row of 2,048, three outputs", lambda: cases_norm.prepare(1, 2048, "prc", True), 1, 2048 * (16 + 7)
    ),
    Row("w8, 4 tokens of 2,048", lambda: cases_embedding.prepare("w8", 2048), 1, 4 * 2048 * 5),
    _linear("w4g128", 5120, 2048, 1, 4.125),
    _linear("w4g128", 5120, 2048, 1, 4.125, norm=True),
    _linear("w4g128", 5120, 2048, 16, 4.125),
    _linear("w8", 151936, 2048, 1, 8),
    _linear("bf16", 5120, 2048, 1, 16),
    _linear("mxfp4", 5120, 2880, 1, 4.25),
    *_experts(1),
    *_experts(16),
    Row(
        "8 experts of 1 token, 2,048", lambda: cases_experts.combine(2048, 1, 8, True), 1, 2048 * 4 * (8 + 3)
    ),
    Row(
        "32 + 2 x 4 heads of 128, int8 pages, 1 row",
        lambda: cases_heads.fused(HEADS),
        1,
        128 * (40 * 4 + 32 * 4 + 8),
    ),
    _attention("int8", 4096, 4),
    _attention("int8", 32768, 4),
    _attention("bf16", 4096, 4),
    _prompt("int8", 512, 256),
    _prompt("bf16", 512, 256),
    _latent("int8", 16, 4096),
    _latent("bf16", 16, 4096),
    _latent("int8", 128, 4096),
    Row(
        "32 heads of 128, 6 splits",
        lambda: cases_attention.combine(1, 32, 128, 6, False),
        1,
        32 * 4 * (6 * 130 + 128),
    ),
    Row(
        "4 drafts of 4 tokens, 64 candidates a row",
        lambda: cases_verify.prepare(
            tuple(cases_verify.Draft(cases_verify.WARM, 4, 4) for _ in range(4)), 300, 64
        ),
        1,
        4 * 5 * 64 * 8,
    ),
    Row(
        "128 experts of 2,048, top-8, 1 row",
        lambda: cases_norm_route.prepare(RouterSpec(128, 8), 1, 2048),
        1,
        128 * 2048 * 4 + 3 * 2048 * 4,
    ),
    Row("128 experts, top-8, 1 row", lambda: cases_router.prepare(RouterSpec(128, 8), 1), 1, 128 * 4 + 64),
]


COLUMNS = (
    *(
        "kernel",
        "shape",
        "must move",
        "moves",
        "besides",
        "registers",
        "occupancy",
        "conflicts",
    ),
    *("bytes' limit, us", "tensor limit, us", "predicted, us"),
)


def line(row: Row) -> str:
    """One row of the table."""
    prepared, profile = row.make(), Profile()
    call = prepared.call
    PtxSimulator(ptx_of(call.file)).run(call, profile)
    usage = usage_of(compiled(call.file).log)[call.entry]
    streamed = {argument for arguments in prepared.streams for argument in arguments}
    sectors = {True: 0, False: 0}
    for argument, count in profile.sectors.items():
        sectors[argument in streamed] += count * SECTOR * row.times
    moved = sectors[True] or sectors[False]
    memory = (row.must_move if row.again else moved) / (BANDWIDTH * REACHABLE)
    issue = profile.instructions * row.times / (SMS * SCHEDULERS * CLOCK * ISSUE_RATE)
    tensor = profile.products * row.times / (PRODUCTS * REACHABLE)
    slowest = max((memory, ""), (issue, " (issue)"), (tensor, " (tensor)"))
    cells = (
        f"`{call.entry}`",
        row.shape,
        _size(row.must_move),
        _size(moved),
        _size(sectors[False]) if sectors[True] else "-",
        str(usage.registers),
        f"{usage.occupancy(call.block, call.shared_bytes):.0%}",
        f"{profile.conflicts:.2f}",
        f"{row.must_move / BANDWIDTH * 1e6:.1f}",
        f"{row.products / PRODUCTS * 1e6:.1f}" if row.products else "-",
        f"{slowest[0] * 1e6:.1f}{slowest[1]}",
    )
    return f"| {' | '.join(cells)} |"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} KB"


def main() -> None:
    from report_prefill import PREFILL_ROWS

    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in [*ROWS, *PREFILL_ROWS]:
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
