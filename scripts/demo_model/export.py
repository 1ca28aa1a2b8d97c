"""Write a demo model as a Hugging Face checkpoint (Qwen3MoeForCausalLM or Qwen3ForCausalLM) and read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.model import DemoModel, ModelConfig

END_OF_TEXT, IM_END = 0, 2
TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def hf_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Tensors under their Hugging Face names, bf16."""
    c = model.c
    sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    out: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, block in enumerate(model.layers()):
        p = f"model.layers.{i}."
        for name, part in zip("qkv", torch.split(block.qkv, sizes, 0), strict=True):
            out[f"{p}self_attn.{name}_proj.weight"] = part
        out |= {
            p + "self_attn.o_proj.weight": block.out,
            p + "self_attn.q_norm.weight": block.q_norm,
            p + "self_attn.k_norm.weight": block.k_norm,
            p + "input_layernorm.weight": block.attn_norm,
            p + "post_attention_layernorm.weight": block.ffn_norm,
        }
        if not c.experts:
            out |= _ffn(p + "mlp.", block.gate_up, block.down)
            continue
        out[p + "mlp.gate.weight"] = block.router
        for e in range(c.experts):
            out |= _ffn(f"{p}mlp.experts.{e}.", block.gate_up[e], block.down[e])
    return {k: v.detach().bfloat16().contiguous().clone() for k, v in out.items()}


def _ffn(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2, 0)
    return {
        prefix + "gate_proj.weight": gate,
        prefix + "up_proj.weight": up,
        prefix + "down_proj.weight": down,
    }


def hf_config(c: ModelConfig) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = {
        "_name_or_path": "strata-demo" if c.experts else "strata-demo-draft",
        "architectures": ["Qwen3MoeForCausalLM" if c.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if c.experts else "qwen3",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.inner,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": c.theta,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
    }
    if c.experts:
        config |= {
            "num_experts": c.experts,
            "num_experts_per_tok": c.top_k,
            "moe_intermediate_size": c.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": c.balance,
        }
    return config


def save_checkpoint(model: DemoModel, tokenizer: Path, out: Path) -> None:
    """Write every file under a temporary name first: a reader never meets half a file."""
    out.mkdir(parents=True, exist_ok=True)
    eos = [IM_END, END_OF_TEXT]
    documents = {
        "config.json": hf_config(model.c),
        "generation_config.json": {"do_sample": False, "eos_token_id": eos, "pad_token_id": END_OF_TEXT},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    }
    for name, content in documents.items():
        (out / f"{name}.new").write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja.new").write_text(TEMPLATE)
    shutil.copy(tokenizer, out / "tokenizer.json.new")
    save_file(hf_tensors(model), out / "model.safetensors.new", metadata={"format": "pt"})
    for path in out.glob("*.new"):
        path.replace(path.with_suffix(""))


def load_checkpoint(folder: Path) -> DemoModel:
    """The trainer's model from an exported checkpoint."""
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    experts = raw.get("num_experts", 0)
    c = ModelConfig(
        raw["vocab_size"], raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"],
        raw["num_key_value_heads"], raw["head_dim"], experts, raw.get("num_experts_per_tok", 0),
        raw.get("moe_intermediate_size", raw["intermediate_size"]), raw["rope_theta"],
    )  # fmt: skip
    model = DemoModel(c)
    state = {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for i in range(c.layers):
        part = {k.removeprefix(f"model.layers.{i}."): v for k, v in tensors.items() if f"layers.{i}." in k}
        state |= {f"blocks.{i}.{k}": v for k, v in _block_state(part, experts).items()}
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return model.eval()


def _block_state(part: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    attention = [part[f"self_attn.{n}_proj.weight"] for n in "qkv"]
    state = {
        "qkv": torch.cat(attention),
        "out": part["self_attn.o_proj.weight"],
        "q_norm": part["self_attn.q_norm.weight"],
        "k_norm": part["self_attn.k_norm.weight"],
        "attn_norm": part["input_layernorm.weight"],
        "ffn_norm": part["post_attention_layernorm.weight"],
    }
    prefixes = [f"mlp.experts.{e}." for e in range(experts)] or ["mlp."]
    gate_up = [torch.cat([part[p + "gate_proj.weight"], part[p + "up_proj.weight"]]) for p in prefixes]
    down = [part[p + "down_proj.weight"] for p in prefixes]
    if not experts:
        return state | {"gate_up": gate_up[0], "down": down[0]}
    state["router"] = part["mlp.gate.weight"]
    return state | {"gate_up": torch.stack(gate_up), "down": torch.stack(down)}
