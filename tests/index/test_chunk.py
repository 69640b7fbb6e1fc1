"""Chunk keys: fixed values, injectivity, order; chunk layout: offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcr_core.index.chunk import (
    ChunkLayout,
    LayerShape,
    Namespace,
    chunk_keys,
    token_bytes,
)

FIELDS = st.lists(
    st.tuples(st.text(max_size=8), st.binary(max_size=8)),
    max_size=4,
    unique_by=lambda field: field[0],
)


def test_golden_values():
    """These bytes are on users' disks: a change needs a new FORMAT_VERSION."""
    namespace = Namespace.of([("weights", b"\x01\x02"), ("tenant", b"")])
    assert namespace.root.hex() == (
        "bc7fe610ad0c51a40c4a6ba66aa3048ae1963c11240f8fe6944b390c6e4a93f7"
    )
    assert namespace.name == "bc7fe610ad0c51a4"
    assert [key.hex() for key in chunk_keys(namespace, range(40), 16)] == [
        "71094afb99a20117a0f1bd47ea5d9bd70f493fadb33b2929fad967a9e38e7b5d",
        "125dfd0fed12544ccf73f946de56c8d9b89dee9c6bf3de09e553aad27714f90a",
    ]
    assert [key.hex() for key in chunk_keys(namespace, [2**32 - 1] * 16, 16)] == [
        "cf0b42e91af76bba76eb5aa59c1471ba7a58d7ed74c322a7fa72b606e590b8ff"
    ]


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (15, 0), (16, 1), (33, 2)])
def test_only_full_chunks_have_keys(length, chunks):
    namespace = Namespace.of([])
    assert len(chunk_keys(namespace, [7] * length, 16)) == chunks


@given(FIELDS, st.randoms())
def test_namespace_does_not_depend_on_field_order(fields, random):
    shuffled = list(fields)
    random.shuffle(shuffled)
    assert Namespace.of(fields) == Namespace.of(shuffled)


@given(FIELDS, FIELDS)
def test_different_fields_give_different_namespaces(one, other):
    if sorted(one) != sorted(other):
        assert Namespace.of(one) != Namespace.of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("a", b"bc")], [("ab", b"c")]),
        ([("a", b""), ("b", b"")], [("a", b"b")]),
        ([("lora", b"x"), ("tenant", b"y")], [("lora", b"xtenanty")]),
        ([("a", b"\x00")], [("a", b"")]),
    ],
)
def test_bytes_cannot_move_between_fields(one, other):
    assert Namespace.of(one) != Namespace.of(other)


@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=24),
    st.lists(st.integers(0, 3), min_size=4, max_size=24),
)
def test_keys_are_equal_exactly_where_the_prefixes_are(one, other):
    namespace = Namespace.of([])
    keys = zip(
        chunk_keys(namespace, one, 4), chunk_keys(namespace, other, 4), strict=False
    )
    for index, (left, right) in enumerate(keys):
        end = 4 * (index + 1)
        assert (left == right) == (one[:end] == other[:end])


def test_namespaces_share_no_key():
    tokens = [1] * 32
    mine = chunk_keys(Namespace.of([("tenant", b"a")]), tokens, 16)
    theirs = chunk_keys(Namespace.of([("tenant", b"b")]), tokens, 16)
    assert not set(mine) & set(theirs)


def test_token_bytes_are_little_endian_and_refuse_what_does_not_fit():
    assert token_bytes([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_bytes([bad])


def test_layout_offsets_with_different_heads_per_layer():
    layout = ChunkLayout((LayerShape(1, 4, 2), LayerShape(2, 2, 4)), 16, "BF16", 2)
    assert (layout.k_bytes(0), layout.v_bytes(0)) == (128, 64)
    assert (layout.k_bytes(1), layout.v_bytes(1)) == (128, 256)
    assert layout.layer_offsets == (0, 192, 576)
    assert (layout.nbytes, layout.bytes_per_token) == (576, 36)
