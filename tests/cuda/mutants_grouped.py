"""Planted defects of int8 pages with several scales per head: what `mutants.TABLE` takes in."""

from __future__ import annotations

GROUPED, WIDE, HEADS = "attention_grouped", "attention_wide.cuh", "prepare_heads"
# As in mutants.TABLE.
GROUPED_TABLE: list[tuple[str, str, str, str]] = [
    (GROUPED, WIDE, "16 * Parts::step(0, warp) / shape.group", "0"),
    (GROUPED, WIDE, "Parts::step(0, warp) / shape.group", "Parts::step(0, warp + 1) / shape.group"),
    (GROUPED, WIDE, "(Key + shape.group - 1) / shape.group : 1", "1 : 1"),
    (GROUPED, WIDE, "scale_scores<Kind>(scores, key_scales[0]);", ""),
    (GROUPED, WIDE, "key_scales[0] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);", ""),
    (GROUPED, WIDE, "kBytes == 1 && !Kind::kGrouped", "kBytes == 1"),
    (GROUPED, WIDE, "Kind::scale(key_scales, i / 4, i % 2)", "Kind::scale(key_scales, 0, i % 2)"),
    (GROUPED, "kv_page.cuh", "value_scales += group * page_tokens", "value_scales += 0"),
    (HEADS, "", "[group * to.page_tokens] = scale", "[0] = scale"),
    (HEADS, "", "min(begin + to.code_group, to.dim)", "to.dim"),
    (HEADS, "", "largest_of(head + begin, end - begin)", "largest_of(head, end - begin)"),
    (HEADS, "", "int word = begin / 4 + threadIdx.x", "int word = threadIdx.x"),
    (HEADS, "", "int i = begin + threadIdx.x", "int i = threadIdx.x"),
    (HEADS, "", "(dim + code_group - 1) / code_group * page_tokens * 4", "page_tokens * 4"),
]
