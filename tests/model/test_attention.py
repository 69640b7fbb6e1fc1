"""Attention against torch's own and against stock models; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from pcr_core.errors import UnsupportedModelError
from pcr_core.index.chunk import LayerShape
from pcr_core.model import attention_kernels
from pcr_core.model.attention import (
    AttentionPlan,
    KvAttention,
    attention_installed,
)
from pcr_core.model.attention_kernels import KeyPortions
from pcr_core.model.attention_probe import fused_plan, plan_attention
from pcr_core.model.key_blocks import KEY_BLOCK, round_up
from pcr_core.model.masks import LazyMask, lazy_mask
from pcr_core.model.product_probe import finest_portions

HEADS, KV_HEADS, DIM = 4, 2, 16
SHAPES = [LayerShape(KV_HEADS, DIM, DIM)]
DTYPES = [torch.float32, torch.bfloat16]


def random(heads: int, count: int, dtype: torch.dtype, dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(heads * 1000 + count)
    return torch.randn(1, heads, count, dim, generator=generator).to(dtype)


def buffers(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with ``length`` real positions, the rest of the buffer arbitrary."""
    capacity = round_up(length, KEY_BLOCK)
    return random(KV_HEADS, capacity, dtype), random(KV_HEADS, capacity, dtype) * 3


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor
) -> torch.Tensor:
    """Stock SDPA in fp64 over expanded heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    return scaled_dot_product_attention(q.double(), k, v, attn_mask=keep)


def run(
    attention: KvAttention,
    function: Any,
    first: int,
    stop: int,
    dtype: torch.dtype,
    length: int,
) -> torch.Tensor:
    k, v = buffers(length, dtype)
    q = random(HEADS, length, dtype)[:, :, first:stop]
    mask = LazyMask(function, first, stop - first, k.shape[2])
    out, weights = attention(torch.nn.Identity(), q, k, v, mask)
    assert weights is None
    return out[0]


PLANS = {
    "fused": AttentionPlan(),
    "unfused": AttentionPlan(unfused=KeyPortions(64, 64), decode="unfused"),
    "unfused, whole blocks": AttentionPlan(unfused=KeyPortions(), decode="rows"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(
    ("first", "stop"),
    [(0, 1), (0, 40), (16, 40), (0, 512), (500, 530), (0, 1100), (700, 701)],
)
def test_against_stock(
    plan: AttentionPlan, dtype: torch.dtype, window: int | None, first: int, stop: int
) -> None:
    function = causal_mask_function
    if window is not None:
        function = sliding_window_causal_mask_function(window)
    attention = KvAttention(plan)
    out = run(attention, function, first, stop, dtype, stop)
    k, v = buffers(stop, dtype)
    q = random(HEADS, stop, dtype)[:, :, first:stop]
    positions = torch.arange(first, stop)[:, None]
    keys = torch.arange(k.shape[2])[None]
    keep = keys <= positions
    if window is not None:
        keep &= keys > positions - window
    want = expected(q, k, v, keep)[0].transpose(0, 1)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    assert torch.allclose(out.double(), want, atol=tolerance)


@pytest.mark.parametrize("unfused", [False, True], ids=["fused", "unfused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
def test_bits_do_not_depend_on_the_cut(
    unfused: bool, dtype: torch.dtype, window: int | None
) -> None:
    """With the plans that this machine's kernels earned, the slower one too."""
    function = causal_mask_function
    if window is not None:
        function = sliding_window_causal_mask_function(window)
    if unfused:
        portions = finest_portions(HEADS, SHAPES, dtype, 2048)
        if portions is None:
            pytest.skip("this machine's products depend on the number of rows")
        plan = AttentionPlan(unfused=portions)
    else:
        plan = AttentionPlan(*fused_plan(HEADS, SHAPES, dtype))
    attention = KvAttention(plan)
    length = 1104
    whole = run(attention, function, 0, length, dtype, length)
    for first, stop in (
        *((a, a + 16) for a in range(0, length, 112)),
        (0, 528),
        (528, length),
        (480, 544),
        (1024, 1104),
        (1088, 1104),
    ):
        part = run(attention, function, first, stop, dtype, length)
        assert torch.equal(part, whole[first:stop]), (first, stop)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_is_behind_the_last_query_changes_nothing(plan: AttentionPlan) -> None:
    attention = KvAttention(plan)
    k, v = buffers(100, torch.float32)
    q = random(HEADS, 20, torch.float32)
    results = []
    for scale in (1.0, -7.0, 1e30):
        k[:, :, 100:] *= scale
        v[:, :, 100:] *= scale
        mask = LazyMask(causal_mask_function, 80, 20, k.shape[2])
        results.append(attention(torch.nn.Identity(), q, k, v, mask)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_different_head_sizes_of_k_and_v(plan: AttentionPlan) -> None:
    q = random(4, 20, torch.float32, 24)
    k, v = random(4, 512, torch.float32, 24), random(4, 512, torch.float32, 16)
    mask = LazyMask(causal_mask_function, 0, 20, 512)
    out, _ = KvAttention(plan)(torch.nn.Identity(), q, k, v, mask)
    assert out.shape == (1, 20, 4, 16)
    keep = torch.arange(512)[None] <= torch.arange(20)[:, None]
    want = expected(q, k, v, keep)[0].transpose(0, 1)
    assert torch.allclose(out[0].double(), want, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_scaling_is_used(plan: AttentionPlan) -> None:
    q, (k, v) = random(HEADS, 20, torch.float32), buffers(20, torch.float32)
    mask = LazyMask(causal_mask_function, 0, 20, 512)
    attention, module = KvAttention(plan), torch.nn.Identity()
    default, _ = attention(module, q, k, v, mask)
    same, _ = attention(module, q, k, v, mask, scaling=DIM**-0.5)
    other, _ = attention(module, q, k, v, mask, scaling=1.0)
    assert torch.allclose(default, same)
    assert not torch.allclose(default, other, atol=1e-2)


def test_a_very_long_window_is_computed_head_by_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And scores of a long prompt never need much memory."""
    attention, whole = KvAttention(PLANS["unfused"]), KvAttention(AttentionPlan())
    dtype, length = torch.float32, 1000
    expected = run(whole, causal_mask_function, 100, length, dtype, length)
    for limit in (1, 200_000):
        monkeypatch.setattr(attention_kernels, "_SCORE_BYTES", limit)
        out = run(attention, causal_mask_function, 100, length, dtype, length)
        assert torch.allclose(out, expected, atol=1e-4)
    assert attention._prefill._memory.nbytes <= 2 * 16 * 2 * 1024 * 4


def test_decode_with_gaps_in_the_mask() -> None:
    """Some keys in the middle hidden: then SDPA needs the mask."""

    def even(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return (kv <= q) & (kv % 2 == 0)

    q, (k, v) = random(HEADS, 1, torch.float32), buffers(100, torch.float32)
    keep = (torch.arange(512)[None] <= 99) & (torch.arange(512)[None] % 2 == 0)
    want = expected(q, k, v, keep)[0].transpose(0, 1)
    for decode in ("heads", "rows", "unfused"):
        mask = LazyMask(even, 99, 1, 512)
        attention = KvAttention(AttentionPlan(decode=decode))
        out, _ = attention(torch.nn.Identity(), q, k, v, mask)
        assert torch.allclose(out[0].double(), want, atol=1e-4), decode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_probe_gives_a_plan_that_can_be_run(dtype: torch.dtype) -> None:
    plan = plan_attention(HEADS, SHAPES, dtype, 2048)
    assert plan.decode in ("heads", "rows", "unfused")
    length = 100
    out = run(KvAttention(plan), causal_mask_function, 0, length, dtype, length)
    assert out.isfinite().all()


# --- masks ---


def test_the_keys_a_query_sees() -> None:
    device = torch.device("cpu")
    window = sliding_window_causal_mask_function(3)
    assert LazyMask(causal_mask_function, 9, 1, 512).seen_by_first(device) == (0, 10)
    mask = LazyMask(window, 9, 1, 512)
    assert mask.seen_by_first(device) == (7, 10)
    assert mask.seen_by_first(device) == (7, 10)
    assert LazyMask(window, 1, 1, 512).seen_by_first(device) == (0, 2)
    gap = LazyMask(lambda b, h, q, kv: (kv < q) & (kv != 4), 9, 1, 512)
    assert gap.seen_by_first(device) is None
    assert gap.seen_by_first(device) is None


def test_a_block_of_the_mask() -> None:
    mask = LazyMask(sliding_window_causal_mask_function(3), 10, 4, 512)
    like = torch.zeros(1, dtype=torch.float32)
    block = mask.block(1, 3, 16, like)
    assert block.shape == (1, 1, 2, 16)
    visible = [(block[0, 0, i] == 0).nonzero().flatten().tolist() for i in range(2)]
    assert visible == [[9, 10, 11], [10, 11, 12]]
    assert set(block.unique().tolist()) == {0.0, float("-inf")}
    assert mask.block(1, 3, 16, like) is block, "one per forward, not per layer"
    assert not mask.causal
    assert LazyMask(causal_mask_function, 0, 1, 1).causal


def test_a_padding_mask_is_refused(tiny_llama: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="padding mask"):
        lazy_mask(attention_mask=torch.ones(1, 4))
    ids = torch.ones(2, 6, dtype=torch.long)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with (
        attention_installed(tiny_llama, KvAttention(AttentionPlan())),
        pytest.raises(UnsupportedModelError, match="set_attn_implementation"),
    ):
        tiny_llama(input_ids=ids, attention_mask=padding)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_what_sdpa_cannot_do_is_refused(option: str) -> None:
    q, (k, v) = random(HEADS, 20, torch.float32), buffers(20, torch.float32)
    mask = LazyMask(causal_mask_function, 0, 20, 512)
    with pytest.raises(UnsupportedModelError, match=option):
        KvAttention(AttentionPlan())(
            torch.nn.Identity(), q, k, v, mask, **{option: 30.0}
        )


def test_no_mask_is_refused() -> None:
    q, (k, v) = random(HEADS, 20, torch.float32), buffers(20, torch.float32)
    with pytest.raises(UnsupportedModelError, match="without a causal mask"):
        KvAttention(AttentionPlan())(torch.nn.Identity(), q, k, v, None)


# --- in a model ---


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", ["llama", "mistral_sliding", "gemma3", "qwen2"])
def test_whole_models_against_stock(
    make_tiny_model: Any, kind: str, plan: AttentionPlan
) -> None:
    from pcr_core.model.layerwise_cache import LayerwiseCache
    from pcr_core.model.loading import probe_shapes
    from pcr_core.model.row_buffer import RowBuffer
    from pcr_core.model.streams import inline_streams

    model = make_tiny_model(kind)
    ids = torch.arange(600)[None] % 250
    with torch.inference_mode():
        stock = model(ids).logits
    buffer = RowBuffer(probe_shapes(model), torch.float32, torch.device("cpu"))
    buffer.reserve(600)
    with (
        torch.inference_mode(),
        attention_installed(model, KvAttention(plan)),
    ):
        cache = LayerwiseCache(buffer, inline_streams(buffer.keys[0].device))
        cache.begin(0)
        from pcr_core.model import _compat

        ours = model(ids, **{_compat.cache_argument(model): cache}).logits
    assert torch.allclose(ours, stock, atol=2e-3)
    assert model.config._attn_implementation == "sdpa"


def test_the_name_tells_plans_apart() -> None:
    names = {
        KvAttention(plan).name
        for plan in (
            AttentionPlan(),
            AttentionPlan((32,)),
            AttentionPlan(key_grain=64),
            AttentionPlan((32,), 64),
            AttentionPlan(unfused=KeyPortions()),
            AttentionPlan(unfused=KeyPortions(64)),
            AttentionPlan(decode="rows"),
        )
    }
    assert len(names) == 7
    assert KvAttention(AttentionPlan()).name in names


def test_the_models_own_attention_is_put_back_after_an_error(tiny_llama: Any) -> None:
    tiny_llama.set_attn_implementation("eager")
    with (
        pytest.raises(ZeroDivisionError),
        attention_installed(tiny_llama, KvAttention(AttentionPlan())),
    ):
        raise ZeroDivisionError
    assert tiny_llama.config._attn_implementation == "eager"
