"""The pieces of the forward pass, put together one by one, compute the same thing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from examples.benchmarks.forward_variants import in_turns, one_round, rows_of
from examples.benchmarks.ingredients import PIECES, Plans, twin, variants
from pcr_core import EngineConfig
from pcr_core.model.attention import AttentionPlan
from pcr_core.model.compiled_glue import choose_glue
from pcr_core.model.linear import LayerPlan
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.prefill_plan import shape_independent
from pcr_core.model.row_tiles import RowTiles

PROMPT = [7 + index * 5 % 89 for index in range(40)]
SUFFIX = 6


class AnyShape(dict[Any, LayerPlan]):
    """One plan for layers of every shape."""

    def __missing__(self, shape: Any) -> LayerPlan:
        return LayerPlan(packed=False, tiles=RowTiles({16: 1.0}))


PLANS = Plans(
    AttentionPlan(),
    AnyShape(),
    AnyShape()[0, 0, False],
    shape_independent(),
    choose_glue(torch.float32).glue,
)


@pytest.fixture
def loaded(make_tiny_model: Any, tiny_tokenizer: Any) -> LoadedModel:
    return load(EngineConfig(), make_tiny_model("llama"), tiny_tokenizer)


def logits(forward: Any) -> list[torch.Tensor]:
    """Of a cold prompt, a hit and two steps."""
    cold = forward.cold(PROMPT)
    hit = forward.hit(PROMPT[-SUFFIX:], len(PROMPT) - SUFFIX)
    steps = [forward.step(3), forward.step(4)]
    forward.rewind(2)
    return [cold, hit, *steps, forward.step(3)]


def test_every_variant_computes_what_stock_does(loaded: LoadedModel) -> None:
    with ExitStack() as lifetimes:
        makers = variants(loaded, PLANS, len(PROMPT) + 4)
        found = {name: logits(make(lifetimes)) for name, make in makers.items()}
    stock = found.pop("stock")
    assert len(found) == 2 * len(PIECES) + 3
    for name, mine in found.items():
        for one, other in zip(mine, stock, strict=True):
            assert torch.allclose(one, other, atol=1e-4), name
    for cold, hit, step, _, again in (stock, *found.values()):
        assert torch.allclose(cold, hit, atol=1e-4)
        assert torch.allclose(step, again, atol=1e-4)


def test_the_model_itself_stays_as_it_is(loaded: LoadedModel) -> None:
    before = {id(one) for one in loaded.model.parameters()}
    attention = loaded.model.config._attn_implementation
    with ExitStack() as lifetimes:
        forward = variants(loaded, PLANS, 64)["all"](lifetimes)
        assert loaded.model.config._attn_implementation == attention
        assert not any("forward" in vars(one) for one in loaded.model.modules())
        forward.cold(PROMPT)
    assert {id(one) for one in loaded.model.parameters()} == before


def test_a_twin_has_no_weights_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other = twin(model)
    assert other is not model
    for mine, its in zip(other.state_dict(), model.state_dict(), strict=True):
        assert mine == its
    assert [id(p) for p in other.parameters()] == [id(p) for p in model.parameters()]


class Scripted:
    """Notes what it is asked for; always answers token 2."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def _answer(self, *asked: Any) -> torch.Tensor:
        self.asked.append(asked)
        return torch.tensor([[0.0, 0.0, 1.0]])

    def cold(self, ids: Any) -> torch.Tensor:
        return self._answer("cold", len(ids))

    def hit(self, ids: Any, start: int) -> torch.Tensor:
        return self._answer("hit", len(ids), start)

    def step(self, token: int) -> torch.Tensor:
        return self._answer("step", token)

    def rewind(self, tokens: int) -> None:
        self.asked.append(("rewind", tokens))


def test_a_round_is_a_prompt_then_hits_then_steps() -> None:
    forward = Scripted()
    seconds, token = one_round(forward, list(range(10)), suffix=3, hits=2, steps=2)
    assert token == 2
    assert set(seconds) == {"cold", "hit", "step"}
    assert forward.asked == [
        ("cold", 10),
        *[("hit", 3, 7)] * 2,
        *[("step", 2)] * 2,
        ("rewind", 2),
    ]


def test_the_table_has_a_row_a_variant_and_the_first_round_does_not_count() -> None:
    class Options:
        suffix, hits, steps, seconds = 2, 1, 1, 60.0

    forwards = {"stock": Scripted(), "+ kv": Scripted()}
    found = in_turns(forwards, [[1, 2, 3]] * 4, Options)
    assert {len(one["cold"]) for one in found["seconds"].values()} == {3}
    rows = rows_of("float32", found)
    assert [row[1] for row in rows] == ["stock", "+ kv"]
    assert [row[-1] for row in rows] == ["4/4", "4/4"]
    assert rows[0][3] == "1.00 (1.00-1.00)"


def test_a_long_run_ends_after_a_round_that_counts() -> None:
    class Options:
        suffix, hits, steps, seconds = 2, 1, 1, 0.0

    found = in_turns({"stock": Scripted()}, [[1, 2, 3]] * 9, Options)
    assert found["prompts"] == 2
    assert len(found["seconds"]["stock"]["hit"]) == 1
    assert found["same"] == {"stock": 2}
