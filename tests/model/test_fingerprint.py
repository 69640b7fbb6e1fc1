"""Models whose KV differs have different fingerprints; the same model has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pcr_core.config import EngineConfig
from pcr_core.model.fingerprint import config_digest, model_fields, weights_digest
from pcr_core.model.loading import load
from pcr_core.model.setup import model_prepared


def test_the_same_model_has_the_same_digest(make_tiny_model: Any) -> None:
    one, two = make_tiny_model("llama"), make_tiny_model("llama")
    assert weights_digest(one) == weights_digest(two)
    assert config_digest(one) == config_digest(two)
    two.config._name_or_path = "elsewhere"
    assert config_digest(one) == config_digest(two)


def _largest(model: Any) -> nn.Parameter:
    return max(model.parameters(), key=lambda p: p.numel())


def _first_value(model: Any) -> None:
    _largest(model).data.view(-1)[0] += 0.01


def _one_token(model: Any) -> None:
    """A special token that was trained, or an embedding that was edited."""
    model.model.embed_tokens.weight.data[201, 33] *= 1.001


def _a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 2


def _every_value_a_bit(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data *= 1.0001


def _one_layer(model: Any) -> None:
    """As a fine-tuned or merged layer: all of its values change."""
    model.model.layers[2].mlp.down_proj.weight.data += 1e-4


def _other_dtype(model: Any) -> None:
    model.to(torch.bfloat16)


def _one_norm(model: Any) -> None:
    model.model.norm.weight.data[-1] = 5.0


def _swapped_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _adapter(model: Any) -> None:
    """LoRA adds parameters beside the layers'."""
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Linear(64, 2, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        _first_value,
        _one_token,
        _a_buffer,
        _every_value_a_bit,
        _one_layer,
        _other_dtype,
        _one_norm,
        _swapped_layers,
        _adapter,
    ],
)
def test_another_model_has_another_digest(
    make_tiny_model: Any, change: Callable[[Any], None]
) -> None:
    model = make_tiny_model("llama")
    before = weights_digest(model)
    with torch.no_grad():
        change(model)
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 1e-3),
        ("sliding_window", 12),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
    ],
)
def test_a_configuration_that_computes_otherwise(
    make_tiny_model: Any, field: str, value: Any
) -> None:
    model = make_tiny_model("mistral_sliding")
    before = config_digest(model)
    setattr(model.config, field, value)
    assert config_digest(model) != before


def _namespace(model: Any, tokenizer: Any, folder: Any, **settings: Any) -> str:
    config = EngineConfig(cache_dir=folder, **settings)
    with model_prepared(load(config, model, tokenizer), config) as ready:
        return str(ready.namespace.name)


def test_namespaces(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Any) -> None:
    """What changes KV, or who may see it, changes the namespace; nothing else does."""

    def name(model: Any = None, **settings: Any) -> str:
        model = model or make_tiny_model("llama")
        return _namespace(model, tiny_tokenizer, tmp_path, **settings)

    base = name()
    assert name() == base
    assert name(dram_bytes=1, ssd_bytes=1, max_queue=3) == base
    hooked = make_tiny_model("llama")  # weights as they were: only the KV itself tells
    hooked.model.layers[0].register_forward_hook(lambda m, i, output: output * 2)
    others = {
        name(namespace="tenant"),
        name(chunk_tokens=64),
        name(exact=False),
        name(make_tiny_model("llama", seed=1)),
        name(make_tiny_model("llama").to(torch.bfloat16)),
        name(make_tiny_model("qwen2")),
        name(hooked),
    }
    assert len(others) == 7
    assert base not in others


def test_fields(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    loaded = load(EngineConfig(), tiny_llama, tiny_tokenizer)
    fields = dict(model_fields(loaded))
    assert set(fields) == {"class", "config", "weights", "dtype", "shapes"}
    assert fields["class"] == b"LlamaForCausalLM"
