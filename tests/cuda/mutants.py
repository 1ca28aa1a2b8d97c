"""Planted defects in the real kernels: each must be reported by the emulator or show in the results.

    python tests/cuda/mutants.py [--file NAME] [--out mutants.json]

Every barrier is taken out once, and the table below plants what else goes wrong in kernels: off by one, the
wrong lane, the wrong stage, a wrong stride, a forgotten tail. A mutant of a header runs in one kernel.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cases import Case
from mutants_fused import FUSED_TABLE
from mutants_grouped import GROUPED_TABLE
from mutants_prefill import PREFILL_TABLE
from runners import EmulatedRunner, source_of

from strata.backends.cuda.emulator import EmulatorError, Order
from strata.backends.cuda.sources import KernelSource

BARRIER = re.compile(r"__sync(threads|warp)\(\);")
FORMATS_KEPT = ("w4g32m", "w4g64", "w4g64m", "mxfp4", "w8", "bf16", "f16")
"""Of kernels with an entry per format: mutants need not compile them all."""


@dataclass(frozen=True)
class Mutant:
    """place: the file that is changed, kernel or header; kernel: whose cases judge it."""

    kernel: str
    place: str
    what: str
    source: KernelSource

    def __str__(self) -> str:
        return f"{self.kernel}: {self.place}: {self.what}"


COMMON, TILE, WIDE = "attention_common.cuh", "attention_tile.cuh", "attention_wide.cuh"
OWN = "own header"
"""Of a kernel whose code is in a header of its name, because other head sizes use it too."""
# kernel, place ("" for the kernel itself), text, its replacement; the first occurrence is changed.
TABLE: list[tuple[str, str, str, str]] = [
    *FUSED_TABLE,
    *GROUPED_TABLE,
    *PREFILL_TABLE,
    ("norm", "", "i < row.quads; i += blockDim.x", "i < row.quads - 1; i += blockDim.x"),
    ("norm", "", "int warp = 1; warp <", "int warp = 2; warp <"),
    ("norm", "", "bits > 0", "bits > 1"),
    ("norm", "", "scale * b.y", "scale * b.x"),
    ("norm", "", "partial[threadIdx.x / kWarp] = value", "partial[threadIdx.x % kWarp] = value"),
    ("norm", "", "columns * 4);\n    row.quads", "columns * 2);\n    row.quads"),
    ("norm", "", "code_byte(y.z, steps) << 16", "code_byte(y.z, steps) << 17"),
    ("norm", "", "pack_bf16(y.x, y.y)", "pack_bf16(y.y, y.x)"),
    ("linear", "", "token < tokens ? x", "token <= tokens ? x"),
    ("linear", "", "row >= shape.rows ||", "row > shape.rows ||"),
    ("linear", "", "|| token >= tokens) continue", "|| token > tokens) continue"),
    ("linear", "", "kTileWarps / shape.row_blocks,", "kTileWarps,"),
    ("linear", "", "i / 8 % 4 + i / 64", "i / 8 % 4 + i / 32"),
    ("linear", "", "row_block * kRowBlock < shape.rows", "row_block * kRowBlock <= shape.rows"),
    ("linear", "tile.cuh", "i + stride < units", "i + stride <= units"),
    ("linear", "tile.cuh", "column < columns", "column <= columns"),
    ("linear", "tile.cuh", "(lane.member + 4 * half) * 8", "(lane.member + 2 * half) * 8"),
    ("linear", "tile.cuh", "pack_bf16(values.x, values.z)", "pack_bf16(values.x, values.y)"),
    (
        "linear",
        "tile.cuh",
        "const Activations<Tiles> current_x = x;",
        "const Activations<Tiles>& current_x = x;",
    ),
    ("linear", "tile.cuh", "warp < kTileWarps; warp += stride", "warp < kTileWarps - 1; warp += stride"),
    ("linear", "tile.cuh", "warp * kWarpFloats + row * kStride", "warp * kWarpFloats + row * kTokens"),
    ("linear", "tile.cuh", "2 * lane.group * kStride", "lane.group * kStride"),
    (
        "linear",
        "tile.cuh",
        "(i < 2 ? scale.x : scale.y) * products",
        "(i < 2 ? scale.y : scale.x) * products",
    ),
    ("linear", "tile.cuh", "kStepsPerGroup + i;", "kStepsPerGroup;"),
    ("linear", "weights.cuh", "lane.member * 64 + lane.group * 8", "lane.group * 64 + lane.member * 8"),
    ("linear", "weights.cuh", "words.x >> (shift + 8)", "words.x >> (shift + 4)"),
    ("linear", "weights.cuh", "? 0xc300c300u : 0xc308c308u", "? 0xc308c308u : 0xc308c308u"),
    ("linear", "weights.cuh", "scales + group * 32)", "scales + group * 16)"),
    ("linear", "weights.cuh", "exponent == 0 ? 0x00400000u : exponent << 23", "exponent << 22"),
    ("linear", "weights.cuh", "step % 2 * 64 + step / 2 * 512", "step % 2 * 512 + step / 2 * 64"),
    ("linear", "weights.cuh", "(nibbles & 0x00080008u) << 12", "(nibbles & 0x00080008u) << 11"),
    ("linear", "weights.cuh", "all.x - __uint_as_float(first << 16)", "all.y - __uint_as_float(first << 16)"),
    ("linear", "weights.cuh", "first & ~0xffffu", "first & 0xffffu"),
    ("linear", "tile.cuh", "if (Format::kRemainder) mma_bf16(products[tile], rest, b)", ""),
    ("expert_gate_up", "", "if (token >= pairs) continue", "if (token > pairs) continue"),
    ("expert_gate_up", "", "token_of_pair(first + token)", "token_of_pair(token)"),
    ("expert_gate_up", "", "element + 8, token)", "element + 7, token)"),
    ("expert_gate_up", "", "blockIdx.z * kTokens, pairs", "0, pairs"),
    ("expert_gate_up", "", "slice) * shape.slice_bytes", "slice) * 0"),
    ("expert_gate_up", "activation.cuh", "held + 1.0f", "held"),
    ("expert_down", "", "min(experts.end() - first, kTokens)", "kTokens"),
    ("expert_down", "", "slice < shape.slices", "slice < 1"),
    ("expert_down", "", "row + slice * shape.slice_width", "row"),
    (
        "expert_down",
        "tile.cuh",
        "float products[Tiles][4] = {}; multiply_units",
        "float(&products)[Tiles][4] = sums; multiply_units",
    ),
    ("expert_down", "", "|| token >= pairs) continue", "|| token > pairs) continue"),
    ("combine", "", "i < first_of_token[token + 1]", "i <= first_of_token[token + 1]"),
    ("combine", "", "if (quad >= quads) return", "if (quad > quads) return"),
    ("combine", "", "weight * part.z", "weight * part.w"),
    ("embedding", "", "i / 4 * 4)", "i / 4 * 5)"),
    ("embedding", "", "row % kRows * scale_bytes", "row % 8 * scale_bytes"),
    ("embedding", "", "column / in_word * kRows", "column / in_word * 8"),
    ("attention_decode", OWN, "token >= begin && token < end", "token >= begin && token <= end"),
    ("attention_decode", OWN, "token >= begin &&", "token > begin &&"),
    ("attention_decode", OWN, "chunk += kAttentionWarps", "chunk += kAttentionWarps + 1"),
    ("attention_decode", OWN, "lane.member * 8 + 4)", "lane.member * 8)"),
    ("attention_decode", OWN, "codes_as_f16(words.x, kOddCodes)", "codes_as_f16(words.x, kEvenCodes)"),
    ("attention_decode", OWN, "weights += own.y * factor", "weights += own.y"),
    ("attention_decode", OWN, "int bits = 4; bits < kWarp", "int bits = 8; bits < kWarp"),
    ("attention_decode", OWN, "(chunks + shape.splits - 1) / shape.splits", "chunks / shape.splits"),
    ("attention_decode", OWN, "blockIdx.y % groups * kQueries", "0"),
    ("attention_decode", OWN, "lane.member + i / 2 * 4", "lane.member + i / 2 * 2"),
    ("attention_decode", OWN, "page_tokens, layer_at", "layer_at, page_tokens"),
    ("attention_decode", OWN, "tile.first_page + token", "token"),
    ("attention_decode", OWN, "static_cast<size_t>(tile.first_row)", "static_cast<size_t>(blockIdx.z)"),
    (
        "attention_decode",
        "attention_common.cuh",
        "first < valid ? 0x0000ffffu",
        "first <= valid ? 0x0000ffffu",
    ),
    ("attention_decode", COMMON, "q.y * factor, q.w * factor", "q.z * factor, q.w * factor"),
    ("attention_decode", COMMON, "0x43004300u, base", "0x43004200u, base"),
    ("attention_decode", "kv_page.cuh", "token % kKvTokens * 4", "token % 8 * 4"),
    ("attention_decode", "kv_page.cuh", "element / 16 *", "element / 8 *"),
    ("attention_combine", "", "tiles[4 * blockIdx.y]", "blockIdx.y"),
    ("attention_prefill", OWN, "copy_async_wait<kStages - 2>", "copy_async_wait<kStages - 1>"),
    ("attention_prefill", OWN, "index % kStages *", "index % 2 *"),
    ("attention_prefill", OWN, "unit >> 3 & 1) << 1", "unit >> 3 & 1) << 0"),
    ("attention_prefill", OWN, "lane.member / 2 * 32", "lane.member % 2 * 32"),
    ("attention_prefill", OWN, "min(chunk, chunks - 1)", "min(chunk, chunks)"),
    ("attention_prefill", OWN, "chunk < chunks)", "chunk < chunks - 1)"),
    ("attention_prefill", OWN, "threadIdx.x < 4 ? head.key_scales", "threadIdx.x < 5 ? head.key_scales"),
    ("attention_prefill", OWN, "i + kStages - 1 < stop", "i + kStages < stop"),
    ("attention_prefill", OWN, "end < token + kStageChunks * kKvTokens", "end < token"),
    ("attention_prefill", OWN, "word / 16 % 8 * 2", "word / 16 % 8"),
    ("attention_prefill", OWN, "operands[step][i + 2] = pair.y", "operands[step][i + 2] = pair.x"),
    ("attention_prefill", OWN, "begin / kKvTokens", "(begin + kKvTokens) / kKvTokens"),
    ("attention_prefill", OWN, "+ row % per_kv_head : nullptr", "+ row / per_kv_head : nullptr"),
    ("attention_prefill", COMMON, "weights * factor + exp2_approx", "weights + exp2_approx"),
    ("attention_prefill", COMMON, "return factor / (weights", "return 1.0f / (weights"),
    ("attention_decode", OWN, "sinks + own_head : nullptr", "sinks + i / Dim : nullptr"),
    ("attention_decode", OWN, "* shape.splits + blockIdx.x", "* shape.splits"),
    ("attention_prefill", OWN, "threadIdx.x / kWarp * 16", "threadIdx.x / kWarp * 8"),
    ("attention_prefill", OWN, "gridDim.x - 1 - blockIdx.x", "gridDim.x - 1"),
    ("attention_prefill", OWN, "shape.splits + blockIdx.z", "shape.splits"),
    ("attention_prefill", OWN, "(all + shape.splits - 1) / shape.splits", "all / shape.splits"),
    ("attention_prefill", OWN, "i < from + kStages - 1", "i < kStages - 1"),
    ("attention_prefill", TILE, "tile.position + token + 1", "tile.position + token"),
    ("attention_prefill", TILE, "end[i] - window", "end[i] - window - 1"),
    ("attention_prefill", TILE, "token < tile.tokens", "token <= tile.tokens"),
    (
        "attention_prefill",
        "attention_tile.cuh",
        "sums[tile][i] *= factors[i / 2]",
        "sums[tile][i] *= factors[i % 2]",
    ),
    ("attention_prefill", TILE, "weights[i] *= factors[i]", "weights[i] *= 1.0f"),
    ("attention_prefill", TILE, "half / 2 * kKvTokens + Kind", "half * kKvTokens + Kind"),
    ("attention_prefill", TILE, "score = sees ? scaled : 0.0f", "score = scaled"),
    (
        "attention_prefill",
        "attention_tile.cuh",
        "a[1] = pack_bf16(even[2], even[3])",
        "a[1] = pack_bf16(odd[0], odd[1])",
    ),
    ("attention_combine", "", "exp2_approx(sinks[blockIdx.x] * kLog2E - largest)", "1.0f"),
    ("attention_combine", "", "element < dim", "element < dim - 1"),
    ("attention_wide", OWN, "i < kTiles ? kTiles * warp + i", "i < kTiles ? warp + i"),
    ("attention_wide", OWN, "if (warp == 0) loaded.value_scales", "if (warp == 1) loaded.value_scales"),
    ("attention_wide", OWN, "lane.member + i % 2 * 4;", "lane.member + i % 2 * 2;"),
    ("attention_wide", OWN, "i / 2 % 2 * 8, word", "i / 2 % 2 * 4, word"),
    ("attention_wide", OWN, "only_valid(far.x, first + 8, valid)", "only_valid(far.x, first, valid)"),
    ("attention_wide", OWN, "operands[step][i + 2] = pair.y", "operands[step][i + 2] = pair.x"),
    ("attention_wide", OWN, "turn % 2 * ((2 * Warps", "turn % 1 * ((2 * Warps"),
    ("attention_wide", OWN, "other < Warps;", "other < Warps - 1;"),
    ("attention_wide", OWN, "next = load(chunk + 1)", "next = load(chunk)"),
    ("attention_wide", OWN, "(chunks + shape.splits - 1) / shape.splits", "chunks / shape.splits"),
    ("attention_wide", OWN, "shape.splits + blockIdx.x", "shape.splits"),
    ("attention_wide", OWN, "gridDim.z - 1 - blockIdx.z", "gridDim.z - 1"),
    ("attention_wide", OWN, "sinks + head : nullptr", "sinks + row : nullptr"),
    ("attention_latent", WIDE, "Value / 16 + warp; }", "Value / 16 + warp - 1; }"),
    ("attention_latent", WIDE, "step(i, warp) < Key / 16", "step(i, warp) <= Key / 16"),
    (
        "attention_latent",
        WIDE,
        "even[1] = transpose8x8(codes_as_bf16(words.y, kEvenCodes))",
        "even[1] = even[0]",
    ),
    ("attention_latent", WIDE, "even[1] = transpose8x8(low.y)", "even[1] = low.y"),
    ("attention_latent", WIDE, "2 * lane.group + 1 >= valid", "2 * lane.group >= valid"),
    ("attention_latent", WIDE, "2 * lane.member + i % 2;", "lane.member + i % 2 * 4;"),
    ("attention_latent", WIDE, "even[0], even[1], odd[0], odd[1]", "even[0], odd[0], even[1], odd[1]"),
    ("attention_latent", WIDE, "blockIdx.y % groups * 16", "0"),
    ("attention_latent", WIDE, "min(16, per_kv_head - in_head)", "16"),
    ("attention_latent", WIDE, "end - token, warp", "end - token + 1, warp"),
    ("attention_latent", "kv_page.cuh", "heads * value_bytes)", "heads * key_bytes)"),
    ("prepare_heads", "", "values ? kv_padded(heads * bytes) : 0", "kv_padded(heads * bytes)"),
    ("prepare_heads", "", "(v != nullptr ? 2 : 1) * kv_heads", "2 * kv_heads"),
    ("prepare_heads", "", "i + pairs]", "i + pairs + 1]"),
    ("prepare_heads", "", "b * cosine + a * sine", "b * cosine - a * sine"),
    ("prepare_heads", "", "if (head >= all) return", "if (head > all) return"),
    ("prepare_heads", "", "code_place(to.token % 4)", "to.token % 4"),
    ("prepare_heads", "", "is_query ? q_norm : is_key ? k_norm", "is_query ? k_norm : is_key ? q_norm"),
    ("prepare_heads", "", "to.token % 2 * 2", "to.token % 2"),
    ("prepare_heads", "kv_page.cuh", "i == 1 ? 2 : i == 2 ? 1 : i", "i"),
    ("router", OWN, "b.index < a.index", "b.index > a.index"),
    ("router", OWN, "choice[expert] = kOut * 1.1f", "choice[expert] = 0.0f"),
    ("router", OWN, "first + second : first", "first : first"),
    ("router", OWN, "chosen[i] = scores[expert]", "chosen[i] = choice[expert]"),
    ("router", OWN, "(i + group) % size", "(i + group) % (size - 1)"),
    ("head_topk", "", "best.place % kTopThreads ==", "best.place % kWarp =="),
    ("head_topk", "", "warp < kTopWarps", "warp < kTopWarps - 1"),
    ("head_topk", "", "span[i] > kNone", "span[i] >= kNone"),
    ("head_topk", "", "first + i, i", "i, i"),
    ("head_topk", "", "columns - first)", "columns)"),
    ("head_topk", "", "(blockIdx.y) * stride + first", "(blockIdx.y) * columns + first"),
    ("head_topk", "", "logit == logit ? logit : kLargest", "logit"),
    ("head_topk", "", "b.value == a.value &&", "false &&"),
    ("head_topk", "", "ids != nullptr ? ids[i] : first + i", "first + i"),
    ("head_topk", "", "* gridDim.x + blockIdx.x) * top", "* gridDim.x) * top"),
    ("verify_draft", "", "share * all + margin", "share * all - margin"),
    ("verify_draft", "", "margin = all * kMargin", "margin = kMargin"),
    ("verify_draft", "", "least + margin)", "least - margin)"),
    ("verify_draft", "", "if (row.values[0] >= kNotFinite) return kUndecided", ""),
    ("verify_draft", "", "if (log_min_p < -1e38f) return row.count", ""),
    ("verify_draft", "", "distance < kWarp; distance", "distance < kWarp / 2; distance"),
    (
        "verify_draft",
        "",
        "before = __shfl_sync(FULL, sum, kWarp - 1)",
        "before += __shfl_sync(FULL, sum, kWarp - 1)",
    ),
    ("verify_draft", "", "min(row.count, settings.top_k)", "row.count"),
    ("verify_draft", "", "row.count = last + 1", "row.count = last"),
    ("verify_draft", "", "row.values[0] + log_min_p", "log_min_p"),
    ("verify_draft", "", "settings.inverse_temperature * kLog2E", "kLog2E"),
    ("verify_draft", "", "row == last ||", "row + 1 == last ||"),
    ("verify_draft", "", "uniforms[row]", "uniforms[begin]"),
    ("verify_draft", "", "static_cast<size_t>(row) * top", "static_cast<size_t>(begin) * top"),
    ("verify_draft", "", "return begin + __popc", "return __popc"),
    ("verify_draft", "", "accepted[sequence] = row - begin", "accepted[sequence] = row - begin + 1"),
    ("gate", "", "i / 8 * 16", "i / 8 * 8"),
    ("gate", "", "i >= width", "i > width"),
    ("copy_heads", "", "* out_head + to", "* out_head + from"),
    ("copy_heads", "", "i >= heads * size", "i > heads * size"),
    ("plain_linear", "", "if (first + row < rows) { const", "if (first + row <= rows) { const"),
    ("plain_linear", "", "output >= outputs", "output > outputs"),
    ("take_rows", "", "column >= columns", "column > columns"),
    ("add", "", "i < count", "i <= count"),
    ("scale_by_sigmoid", "", "column < columns", "column <= columns"),
]


def all_mutants() -> Iterator[Mutant]:
    """The table's, then one per barrier of each kernel and of the headers that only it owns."""
    for kernel, place, old, new in TABLE:
        yield _changed(kernel, f"{kernel}.cuh" if place == OWN else place or f"{kernel}.cu", old, new)
    for kernel in dict.fromkeys(row[0] for row in TABLE):
        source = source_of(kernel)
        own = {name: text for name, text in source.headers.items() if name == f"{kernel}.cuh"}
        for place, text in ({f"{kernel}.cu": source.text} | own).items():
            for match in BARRIER.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                what = f"line {line} without {match[0][:-1]}"
                yield _with_text(kernel, place, text[: match.start()] + ";" + text[match.end() :], what)


def _changed(kernel: str, place: str, old: str, new: str) -> Mutant:
    source = source_of(kernel)
    text = source.text if place == source.name else source.headers[place]
    # clang-format breaks lines where it likes: any white space in the table matches any in the text.
    pattern = re.compile(r"\s+".join(map(re.escape, old.split())))
    found = pattern.search(text)
    assert found, f"{kernel}: `{old}` is not in {place}"
    changed = text[: found.start()] + new + text[found.end() :]
    return _with_text(kernel, place, changed, f"`{' '.join(old.split())}` -> `{' '.join(new.split())}`")


def _with_text(kernel: str, place: str, text: str, what: str) -> Mutant:
    source = source_of(kernel)
    main, headers = source.text, dict(source.headers)
    if place == source.name:
        main = text
    else:
        headers[place] = text
    return Mutant(kernel, place, what, KernelSource(source.name, _fewer_formats(main), headers))


def _fewer_formats(text: str) -> str:
    def kept(match: re.Match[str]) -> str:
        return match[0] if match[1] in FORMATS_KEPT else ""

    return re.sub(r"^\w+_FORMAT\((\w+), .*\)$", kept, text, flags=re.MULTILINE)


def detect(mutant: Mutant, cases: list[Case]) -> str | None:
    """What gave the mutant away, None for a survivor. Blocks that mistake tickets show in a random order
    only."""
    for order in ("reverse", "random"):
        for case in cases:
            found = _found_by(case, mutant, order)  # type: ignore[arg-type]
            if found is not None:
                return found
    return None


def _found_by(case: Case, mutant: Mutant, order: Order) -> str | None:
    prepared = case.make()
    by_format = "_FORMAT(" in mutant.source.text
    if by_format and not any(f"_{fmt}_" in f"{prepared.call.entry}_" for fmt in FORMATS_KEPT):
        return None
    try:
        EmulatedRunner(order).run(prepared.call, mutant.source)
        prepared.check()
    except EmulatorError as error:
        if "g++ refuses" in str(error):
            return "does not compile"
        return str(error).split(": ", 1)[1][:90]
    except AssertionError as error:
        return f"wrong result: {' '.join(str(error).split())[:60]}"
    return None


def main() -> None:
    from test_kernels import ALL

    parser = argparse.ArgumentParser(description="Run planted defects of the kernels.")
    parser.add_argument("--file", action="append", help="only mutants of this kernel; may be repeated")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th mutant, from the i-th on")
    parser.add_argument("--out", type=Path, help="write the findings as JSON")
    options = parser.parse_args()
    findings: dict[str, str | None] = {}
    chosen = [m for m in all_mutants() if not options.file or m.kernel in options.file]
    part, parts = map(int, options.part.split("/"))
    for mutant in chosen[part::parts]:
        found = detect(mutant, [case for case in ALL if case.file == mutant.kernel])
        findings[str(mutant)] = found
        print(f"{'caught  ' if found else 'SURVIVED'} {mutant}  [{found}]", flush=True)
    detected = sum(found is not None for found in findings.values())
    print(f"{detected} of {len(findings)} detected")
    if options.out:
        options.out.write_text(json.dumps(findings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
