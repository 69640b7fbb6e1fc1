"""A profile says where all of the time went, and calls operations what they are."""

from __future__ import annotations

import pytest
import torch

from examples.benchmarks.profile_forward import (
    HEAD,
    SHOWN,
    kind_of,
    profiled,
    rows_of,
    shares,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "products"),
        ("aten::addmm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::baddbmm", "attention"),
        ("aten::_softmax", "attention"),
        ("aten::cat", "copies"),
        ("aten::copy_", "copies"),
        ("aten::constant_pad_nd", "copies"),
        ("aten::silu", "small"),
        ("aten::mul", "small"),
        ("aten::transpose", "small"),
    ],
)
def test_the_kind_of_an_operation(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_are_of_all_the_time() -> None:
    found = shares([("aten::mm", 2.0), ("aten::cat", 1.0), ("aten::mul", 0.5)], 4.0)
    assert found == {
        "attention": 0.0,
        "products": 0.5,
        "copies": 0.25,
        "small": 0.125,
        "python": 0.125,
    }
    assert shares([("aten::mm", 2.0)], 1.0)["python"] == 0.0  # clocks may disagree


def test_real_operations_are_seen_and_told() -> None:
    matrix = torch.ones(8, 8)
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        torch.mm(matrix, matrix)
        torch.cat([matrix, matrix])

    found = profiled(work, 3)
    assert calls == 1 + 3 + 3
    assert {"aten::mm", "aten::cat"} <= found["longest"].keys()
    assert found["operations"] >= 2
    assert sum(found["shares"].values()) == pytest.approx(1.0, abs=0.5)
    assert set(found["shares"]) == set(SHOWN)
    rows = rows_of("float32", {"engine": {"step": found}})
    assert [len(row) for row in rows] == [len(HEAD)]
