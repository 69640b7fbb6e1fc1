"""Lean layers give what the model's own give, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pcr_core.model import _compat
from pcr_core.model.attention import AttentionPlan, KvAttention, attention_installed
from pcr_core.model.compiled_glue import choose_glue
from pcr_core.model.fused import fused_layers
from pcr_core.model.glue import TorchGlue
from pcr_core.model.lean import is_llama_like, lean_layers_installed
from pcr_core.model.linear import (
    all_products_tiled,
    plan_layers,
    row_tiles_installed,
)

ATTENTION = KvAttention(AttentionPlan())
IDS = torch.arange(70)[None] % 250
LEAN = ("llama", "mistral_sliding", "qwen2")
OTHER = ("gemma3",)


def logits(model: Any) -> torch.Tensor:
    from transformers import DynamicCache

    cache = {_compat.cache_argument(model): DynamicCache()}
    with torch.inference_mode():
        out: torch.Tensor = model(IDS, use_cache=True, **cache).logits
    return out


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model: Any, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert fused_layers(model) == []


@pytest.mark.parametrize("glue", ["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAN)
def test_up_to_rounding_they_are_the_models_own(
    make_tiny_model: Any, kind: str, dtype: torch.dtype, glue: str
) -> None:
    chosen = choose_glue(dtype)
    if glue == "compiled" and chosen.reason:
        pytest.skip(chosen.reason)
    between = chosen.glue if glue == "compiled" else TorchGlue()
    model = make_tiny_model(kind).to(dtype)
    before = snapshot(model)
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with attention_installed(model, ATTENTION):
        stock = logits(model)
        with lean_layers_installed(model, ATTENTION, between):
            assert len(fused_layers(model)) == 2 * model.config.num_hidden_layers
            lean = logits(model)
    reference = logits(model.double()).double()
    off, stocks = ((x.double() - reference).square().mean() for x in (lean, stock))
    assert off <= 2 * stocks, "as near to the exact result as the model's own"
    model.to(dtype)
    assert_untouched(model, before)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


@pytest.mark.parametrize("kind", OTHER)
def test_layers_of_another_kind_are_left_alone(make_tiny_model: Any, kind: str) -> None:
    model = make_tiny_model(kind)
    with (
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
    ):
        assert fused_layers(model) == []
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_layer_that_only_looks_like_one_fails_its_trial(make_tiny_model: Any) -> None:
    """Same parts, another arithmetic: what Granite or Cohere do with theirs."""
    model = make_tiny_model("llama")
    before = snapshot(model)
    layer = model.model.layers[1]
    own = type(layer).forward

    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return own(self, *arguments, **options) * 1.5

    layer.__class__ = Scaled
    assert is_llama_like(layer)
    with (
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
    ):
        assert "forward" not in layer.__dict__
        assert len(fused_layers(model)) == 2 * (model.config.num_hidden_layers - 1)
    assert_untouched(model, before)


@pytest.mark.parametrize("hook", ["layer", "linear", "norm", "replaced"])
def test_what_somebody_else_has_hooked_is_left_alone(
    make_tiny_model: Any, hook: str
) -> None:
    layer = make_tiny_model("llama").model.layers[0]
    assert is_llama_like(layer)
    if hook == "layer":
        layer.register_forward_hook(lambda *_: None)
    elif hook == "linear":
        layer.mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    elif hook == "norm":
        layer.input_layernorm.forward = layer.input_layernorm.forward
    else:
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    assert not is_llama_like(layer)


def test_a_part_still_answers_for_itself(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    block = model.model.layers[0].self_attn
    x = torch.randn(1, 20, block.q_proj.in_features)
    parts = (block.q_proj, block.k_proj, block.v_proj)
    with torch.inference_mode(), attention_installed(model, ATTENTION):
        stock = [part(x) for part in parts]
        with lean_layers_installed(model, ATTENTION, TorchGlue()):
            for part, expected in zip(parts, stock, strict=True):
                assert torch.allclose(part(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", LEAN)
def test_no_weight_is_kept_twice(make_tiny_model: Any, kind: str) -> None:
    """Neither by a part that is a view of what it was, nor beside its packed copy."""
    model = make_tiny_model(kind)
    with (
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
        row_tiles_installed(model, plan_layers(model)),
    ):
        dense = [p for p in model.parameters() if p.layout is torch.strided]
        assert dense
        held = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in dense}
        assert sum(storage.nbytes() for storage in held.values()) <= sum(
            p.nbytes for p in dense
        )


@pytest.mark.parametrize("kind", LEAN)
def test_every_product_is_in_tiles(make_tiny_model: Any, kind: str) -> None:
    """The fused ones as well; and one copy of the weights is kept."""
    model = make_tiny_model(kind)
    before = snapshot(model)
    assert all_products_tiled(model)
    with (
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
    ):
        stock = logits(model)
        assert all_products_tiled(model)
        plans = plan_layers(model)
        block, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        biased = block.q_proj.bias is not None
        qkv = sum(getattr(block, f"{name}_proj").out_features for name in "qkv")
        gate_up = 2 * mlp.gate_proj.out_features
        width = block.q_proj.in_features
        assert {(width, qkv, biased), (width, gate_up, False)} <= plans.keys()
        assert block.q_proj.weight.numel() == mlp.up_proj.weight.numel() == 0
        with row_tiles_installed(model, plans):
            assert torch.allclose(logits(model), stock, atol=1e-4)
    assert_untouched(model, before)


def test_a_failure_on_the_way_in_leaves_no_trace(
    make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pcr_core.model import lean

    model = make_tiny_model("llama")
    before = snapshot(model)
    trial, calls = lean._trial, iter(range(100))

    def fails(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("no room")
        return trial(*arguments)

    monkeypatch.setattr(lean, "_trial", fails)
    with (
        attention_installed(model, ATTENTION),
        pytest.raises(MemoryError),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
    ):
        raise AssertionError("not reached")
    assert_untouched(model, before)
