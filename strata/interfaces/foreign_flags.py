"""Flags of llama.cpp, and vLLM's for drafts, that Strata does not have, and what stands in for them."""

from __future__ import annotations

from collections.abc import Sequence

_CARD = "device.use decides about the card, `strata plan` shows what lies where"
_BATCH = "--set engine.prefill_chunk=N is the number of prompt tokens in a step"
_DOWNLOAD = "Strata downloads nothing: `hf download OWNER/NAME --local-dir DIR`, then give DIR as the model"
_DRAFT = "name the draft with -md; `strata plan MODEL -md DRAFT` shows where it computes and its KV"
_LENGTH = "drafts are as long as pays; --draft N is the most, docs/speculation.md says the rest"
_KV = "--set kv.dtype=... takes the place of both"

_INSTEAD = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe"), _CARD),
    **dict.fromkeys(("-ot", "--override-tensor", "-ts", "--tensor-split"), _CARD),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _BATCH),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), _DOWNLOAD),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), _KV),
    **dict.fromkeys(
        ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "-devd", "--device-draft"), _DRAFT
    ),
    **dict.fromkeys(("-cd", "--ctx-size-draft", "-td", "--threads-draft"), _DRAFT),
    **dict.fromkeys(("--draft-min", "--draft-n-min", "--draft-p-min"), _LENGTH),
    **dict.fromkeys(("-fa", "--flash-attn"), "leave it out: there is nothing to switch"),
    **dict.fromkeys(("-f", "--file"), 'pipe it in, or --prompt "$(cat FILE)"'),
}
_VLLM = {
    "--speculative-config": "-md PATH names a draft model or MTP layer, --draft N the longest draft; n-grams "
    "need nothing",
}


def hint(arguments: Sequence[str]) -> str:
    """What to write instead of the first such flag of a command line that was refused, or ""."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in _INSTEAD:
            return f"{flag} is llama.cpp's: {_INSTEAD[flag]}"
        if flag in _VLLM:
            return f"{flag} is vLLM's: {_VLLM[flag]}"
    return ""
