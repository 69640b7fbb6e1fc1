"""Lean layers give what the model's own give, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function

from pcr_core.model import _compat, lean
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
from pcr_core.model.masks import LazyMask

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


@pytest.mark.parametrize("what", ["_trial", "Fused"])
def test_a_failure_on_the_way_in_leaves_no_trace(
    make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """In the second layer: while it is tried, or between its two fused products."""
    model = make_tiny_model("llama")
    before = snapshot(model)
    real, calls = getattr(lean, what), iter(range(100))

    def fails(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError("no room")
        return real(*arguments)

    monkeypatch.setattr(lean, what, fails)
    with (
        attention_installed(model, ATTENTION),
        pytest.raises(MemoryError),
        lean_layers_installed(model, ATTENTION, TorchGlue()),
    ):
        raise AssertionError("not reached")
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_side_by_side(
    make_tiny_model: Any, dtype: torch.dtype
) -> None:
    """Hidden states may be a view into something larger; another dtype is refused."""
    model = make_tiny_model("llama").to(dtype)
    glue = choose_glue(dtype).glue
    with (
        torch.inference_mode(),
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, glue),
    ):
        layer = model.model.layers[0]
        wide = torch.randn(1, 9, 2 * layer.self_attn.q_proj.in_features).to(dtype)
        view = wide[..., : wide.shape[-1] // 2]
        positions = torch.arange(9)[None]
        asked = {
            "attention_mask": LazyMask(causal_mask_function, 0, 9, 9),
            "position_embeddings": model.model.rotary_emb(view, positions),
        }
        expected = layer(view.clone(), **asked)
        assert torch.equal(layer(view, **asked), expected)
        assert torch.equal(wide[..., : wide.shape[-1] // 2], view), "only read"
        other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
        with pytest.raises(ValueError, match="was given"):
            layer(view.to(other), **asked)
        fewer = {
            **asked,
            "position_embeddings": model.model.rotary_emb(view, positions[:, :5]),
        }
        with pytest.raises(ValueError, match="of 9 tokens"):
            layer(view, **fewer)


def _misfit(layer: Any, what: str) -> None:
    """Sizes that torch would refuse, or broadcast; compiled code looks at none."""
    block, mlp = layer.self_attn, layer.mlp
    width = block.q_proj.in_features
    if what == "scalar norm":
        layer.input_layernorm.weight = nn.Parameter(torch.ones(1))
    elif what == "gate and up differ":
        mlp.up_proj = nn.Linear(width, mlp.gate_proj.out_features + 2, bias=False)
    elif what == "values are wider":
        block.v_proj = nn.Linear(width, 2 * block.v_proj.out_features, bias=False)
    elif what == "output is wider":
        block.o_proj = nn.Linear(block.o_proj.in_features, 2 * width, bias=False)
    elif what == "odd heads":
        block.head_dim = 5
    elif what == "no heads":
        block.head_dim = 0
    else:
        layer.post_attention_layernorm.to(torch.bfloat16)


@pytest.mark.parametrize(
    "what",
    [
        "scalar norm",
        "gate and up differ",
        "values are wider",
        "output is wider",
        "odd heads",
        "no heads",
        "another dtype",
    ],
)
def test_layers_whose_sizes_do_not_fit_are_left_alone(
    make_tiny_model: Any, what: str
) -> None:
    layer = make_tiny_model("llama").model.layers[0]
    assert is_llama_like(layer)
    _misfit(layer, what)
    assert not is_llama_like(layer)


def test_layers_of_another_dtype_than_the_glues_are_left_alone(
    make_tiny_model: Any,
) -> None:
    """Compiled code would write twice what there is room for."""
    model = make_tiny_model("llama").to(torch.bfloat16)

    class Wide(TorchGlue):
        dtype = torch.float32

    with (
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, Wide()) as count,
    ):
        assert count == 0
        assert fused_layers(model) == []


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_of_each_row_is_that_of_a_row_alone(
    make_tiny_model: Any, kind: str, dtype: torch.dtype
) -> None:
    """Whatever ran in the same memory before."""
    from torch.nn.functional import scaled_dot_product_attention

    def each_by_itself(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> Any:
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2), None

    model = make_tiny_model(kind).to(dtype)
    glue = choose_glue(dtype).glue
    with (
        torch.inference_mode(),
        attention_installed(model, ATTENTION),
        lean_layers_installed(model, ATTENTION, glue) as count,
        row_tiles_installed(model, plan_layers(model)),
    ):
        assert count == model.config.num_hidden_layers
        layer = model.model.layers[0]
        lean = layer.__dict__["forward"].__self__
        lean._attention = each_by_itself
        x = torch.randn(7, 1, layer.self_attn.q_proj.in_features).to(dtype)
        positions = torch.tensor([[3], [900], [0], [17], [5], [64], [2]])
        cos, sin = model.model.rotary_emb(x, positions)
        alone = [
            layer(x[i : i + 1], None, (cos[i : i + 1], sin[i : i + 1]))
            for i in range(7)
        ]
        for size in (7, 2, 5, 1, 3):
            asked = x[:size], None, (cos[:size], sin[:size])
            kept = layer(*asked)
            again = layer(*asked)
            assert torch.allclose(
                kept.float(), torch.cat(alone[:size]).float(), atol=2e-2
            )
            layer(torch.full_like(x, 3.0), None, (cos, sin))
            assert torch.equal(kept, again), "nobody writes into a result"
