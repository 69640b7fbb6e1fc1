"""Search in stages equals plain FAISS, stage by stage, ties included."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcr_core import ConfigError, RequestError
from pcr_integrations.retrieval import Stage, StagedFaissIndex
from pcr_integrations.retrieval._heaps import Heaps
from pcr_integrations.retrieval._schedule import efforts

faiss = pytest.importorskip("faiss")

METRICS = [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT]
SCHEDULES = st.one_of(
    st.integers(1, 6), st.sets(st.integers(1, 40), max_size=5).map(sorted)
)
SIZES = st.sampled_from([1, 2, 3, 7, 30])


def vectors(rng: np.random.Generator, count: int, d: int, *, ties: bool) -> Any:
    """Few distinct values make many equal distances."""
    made = rng.integers(-1, 2, (count, d)) if ties else rng.standard_normal((count, d))
    return made.astype(np.float32)


def built(spec: str, metric: int, data: Any, ids: Sequence[int] | None = None) -> Any:
    index = faiss.index_factory(data.shape[1], spec, metric)
    inner = index
    while hasattr(inner, "index"):
        inner = faiss.downcast_index(inner.index)
    if hasattr(inner, "cp"):
        inner.cp.min_points_per_centroid = 1  # silence about small training sets
    if hasattr(inner, "pq"):
        inner.pq.cp.min_points_per_centroid = 1
    index.train(data)
    if ids is None:
        index.add(data)
    else:
        index.add_with_ids(data, np.array(ids, dtype=np.int64))
    return index


@cache
def trained(spec: str, metric: int, d: int) -> Any:
    """Training takes long; examples differ in what is added."""
    return built(spec, metric, vectors(np.random.default_rng(0), 60, d, ties=False))


def filled(spec: str, metric: int, data: Any) -> Any:
    index = trained(spec, metric, data.shape[1])
    index.reset()
    index.add(data)
    return index


def same(stage: Stage, found: tuple[Any, Any]) -> None:
    np.testing.assert_array_equal(stage.ids, found[1])
    np.testing.assert_array_equal(stage.distances, found[0])


def in_order(stage: Stage, metric: int) -> None:
    steps = np.diff(stage.distances, axis=1)
    assert np.all(steps >= 0 if metric == faiss.METRIC_L2 else steps <= 0)


def never_worse(before: Stage, after: Stage, metric: int) -> None:
    sign = 1 if metric == faiss.METRIC_L2 else -1
    assert np.all(sign * after.distances <= sign * before.distances)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    spec=st.sampled_from(["IVF6,Flat", "IVF6,SQ8", "IVF6,PQ4x4", "PCA4,IVF6,Flat"]),
    metric=st.sampled_from(METRICS),
    schedule=SCHEDULES,
    nprobe=st.integers(1, 8),
    k=SIZES,
    queries=st.integers(1, 3),
    ties=st.booleans(),
)
def test_each_ivf_stage_is_the_plain_search_with_fewer_lists(
    seed: int,
    spec: str,
    metric: int,
    schedule: Any,
    nprobe: int,
    k: int,
    queries: int,
    ties: bool,
) -> None:
    rng = np.random.default_rng(seed)
    index = filled(spec, metric, vectors(rng, 60, 8, ties=ties))
    ivf = faiss.extract_index_ivf(index)
    ivf.nprobe = nprobe
    asked = vectors(rng, queries, 8, ties=ties)
    stages = list(StagedFaissIndex(index, stages=schedule).stages(asked, k))
    assert [stage.effort for stage in stages][-1] == min(nprobe, 6)
    for before, after in pairwise(stages):
        never_worse(before, after, metric)
    for stage in stages:
        in_order(stage, metric)
        ivf.nprobe = stage.effort
        same(stage, index.search(asked, k))
    ivf.nprobe = nprobe
    same(stages[-1], index.search(asked, k))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 60),
    metric=st.sampled_from(METRICS),
    schedule=SCHEDULES,
    k=st.sampled_from([1, 2, 7, 30, 99, 100, 130]),
    queries=st.integers(1, 3),
    ties=st.booleans(),
)
def test_each_flat_stage_is_the_plain_search_of_fewer_rows(
    seed: int,
    rows: int,
    metric: int,
    schedule: Any,
    k: int,
    queries: int,
    ties: bool,
) -> None:
    rng = np.random.default_rng(seed)
    data = vectors(rng, rows, 5, ties=ties)
    index = built("Flat", metric, data)
    asked = vectors(rng, queries, 5, ties=ties)
    stages = list(StagedFaissIndex(index, stages=schedule).stages(asked, k))
    assert stages[-1].effort == rows
    for before, after in pairwise(stages):
        never_worse(before, after, metric)
    for stage in stages:
        in_order(stage, metric)
        same(stage, built("Flat", metric, data[: stage.effort]).search(asked, k))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    spec=st.sampled_from(["HNSW4,Flat", "HNSW4,SQ8"]),
    metric=st.sampled_from(METRICS),
    schedule=SCHEDULES,
    wide=st.integers(1, 20),
    k=SIZES,
    ties=st.booleans(),
)
def test_each_hnsw_stage_is_the_plain_search_with_that_ef_search(
    seed: int,
    spec: str,
    metric: int,
    schedule: Any,
    wide: int,
    k: int,
    ties: bool,
) -> None:
    rng = np.random.default_rng(seed)
    index = built(spec, metric, vectors(rng, 50, 6, ties=ties))
    index.hnsw.efSearch = wide
    asked = vectors(rng, 2, 6, ties=ties)
    stages = list(StagedFaissIndex(index, stages=schedule).stages(asked, k))
    same(stages[-1], index.search(asked, k))
    assert stages[-1].effort == wide
    for stage in stages:
        in_order(stage, metric)
        index.hnsw.efSearch = stage.effort
        same(stage, index.search(asked, k))
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize("spec", ["IVF6,Flat", "Flat"])
def test_nothing_is_scanned_twice(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = vectors(np.random.default_rng(1), 64, 8, ties=False)
    index = built(spec, faiss.METRIC_L2, data)
    if spec != "Flat":
        index.nprobe = 6
    scanned: list[tuple[int, int]] = []
    scan = Heaps.scan

    def counted(self: Heaps, query: int, part: int, *rest: Any) -> None:
        scanned.append((query, rest[1]))
        scan(self, query, part, *rest)

    monkeypatch.setattr(Heaps, "scan", counted)
    stages = list(StagedFaissIndex(index).stages(data[:2], 3))
    assert len(stages) == 4
    for query in range(2):
        assert sum(count for one, count in scanned if one == query) == len(data)


@pytest.mark.parametrize("spec", ["IDMap,Flat", "IDMap2,IVF3,Flat", "IDMap,HNSW4"])
def test_ids_are_those_of_the_map(spec: str) -> None:
    data = vectors(np.random.default_rng(2), 20, 4, ties=True)
    index = built(spec, faiss.METRIC_L2, data, ids=range(1000, 1020))
    staged = StagedFaissIndex(index)
    stages = list(staged.stages(data[:3], 30))
    same(stages[-1], index.search(data[:3], 30))
    for stage in stages:
        assert set(stage.ids.ravel()) <= {-1, *range(1000, 1020)}
    assert staged.kind in {"flat", "ivf", "hnsw"}


def test_ids_given_to_the_lists_themselves_are_kept() -> None:
    data = vectors(np.random.default_rng(3), 20, 4, ties=True)
    index = built("IVF3,Flat", faiss.METRIC_L2, data, ids=range(500, 520))
    found = StagedFaissIndex(index).search(data[:2], 4)
    np.testing.assert_array_equal(found[1], index.search(data[:2], 4)[1])


@pytest.mark.parametrize(
    "spec", ["Flat", "IVF3,Flat", "HNSW4,Flat", "IDMap,Flat", "IDMap,IVF3,Flat"]
)
def test_an_empty_index_finds_nothing(spec: str) -> None:
    data = vectors(np.random.default_rng(4), 20, 4, ties=False)
    index = (
        built(spec, faiss.METRIC_L2, data)
        if "IDMap" not in spec
        else built(spec, faiss.METRIC_L2, data, ids=range(20))
    )
    index.reset()
    stages = list(StagedFaissIndex(index).stages(data[0], 3))
    assert stages[-1].ids.tolist() == [[-1, -1, -1]]
    same(stages[-1], index.search(data[:1], 3))


def test_fewer_vectors_than_asked_for_give_minus_one() -> None:
    data = vectors(np.random.default_rng(5), 3, 4, ties=False)
    distances, ids = StagedFaissIndex(built("Flat", METRICS[0], data)).search(
        data[0], 5
    )
    assert sorted(ids[0, :3]) == [0, 1, 2]
    assert ids[0, 3:].tolist() == [-1, -1]
    assert np.all(distances[0, 3:] == np.finfo(np.float32).max)


def test_a_query_of_nan_finds_what_faiss_finds() -> None:
    data = vectors(np.random.default_rng(6), 30, 4, ties=False)
    asked = np.full((1, 4), np.nan, dtype=np.float32)
    for spec in ("Flat", "IVF3,Flat"):
        index = built(spec, faiss.METRIC_L2, data)
        found = StagedFaissIndex(index).search(asked, 3)
        np.testing.assert_array_equal(found[1], index.search(asked, 3)[1])


def test_an_untrained_index_says_what_to_do() -> None:
    index = faiss.index_factory(4, "IVF3,Flat")
    staged = StagedFaissIndex(index)
    with pytest.raises(ConfigError, match="not trained"):
        staged.stages(np.zeros(4), 1)


@pytest.mark.parametrize(
    ("queries", "said"),
    [
        (np.zeros(5), r"takes \[queries, 4\]"),
        (np.zeros((2, 3)), r"takes \[queries, 4\]"),
        (np.zeros((0, 4)), r"takes \[queries, 4\]"),
        (np.zeros((1, 1, 4)), r"takes \[queries, 4\]"),
        (["a", "b"], "no array of numbers"),
        ([[1.0, 2.0], [1.0]], "no array of numbers"),
    ],
)
def test_queries_of_a_wrong_shape_are_refused_at_once(queries: Any, said: str) -> None:
    staged = StagedFaissIndex(faiss.IndexFlatL2(4))
    with pytest.raises(RequestError, match=said):
        staged.stages(queries, 1)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "3", None])
def test_k_must_be_a_positive_integer(k: Any) -> None:
    with pytest.raises(RequestError, match="k must be"):
        StagedFaissIndex(faiss.IndexFlatL2(4)).stages(np.zeros(4), k)


@pytest.mark.parametrize(
    "stages", [0, -1, True, "4", 1.5, [3, 3], [4, 2], [0, 1], None]
)
def test_a_schedule_that_is_none_is_refused(stages: Any) -> None:
    with pytest.raises(ConfigError, match="stages is"):
        StagedFaissIndex(faiss.IndexFlatL2(4), stages=stages)


@pytest.mark.parametrize(
    "make",
    [
        lambda: faiss.index_factory(8, "IVF4,PQ4x4fs"),
        lambda: faiss.index_factory(8, "SQ8"),
        lambda: faiss.index_factory(8, "IVF4,Flat,RFlat"),
        lambda: faiss.IndexFlat(8, faiss.METRIC_L1),
        lambda: faiss.IndexBinaryFlat(8),
        lambda: None,
    ],
)
def test_an_index_without_stages_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        StagedFaissIndex(make())


def test_a_limit_of_codes_is_refused() -> None:
    index = faiss.index_factory(8, "IVF4,Flat")
    index.max_codes = 10
    with pytest.raises(ConfigError, match="max_codes"):
        StagedFaissIndex(index)


def test_the_index_that_is_wrapped_lives_as_long_as_the_wrapper() -> None:
    data = vectors(np.random.default_rng(7), 20, 4, ties=False)
    staged = StagedFaissIndex(built("IDMap,Flat", METRICS[0], data, ids=range(20)))
    assert staged.search(data[3], 1)[1].tolist() == [[3]]
    assert len(staged) == 20
    assert "flat, 20 vectors of 4 dimensions" in repr(staged)


def test_scanners_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []
    destroy = faiss.InvertedListScanner.__swig_destroy__

    def counted(scanner: Any) -> None:
        freed.append(scanner)
        destroy(scanner)

    monkeypatch.setattr(
        faiss.InvertedListScanner, "__swig_destroy__", staticmethod(counted)
    )
    data = vectors(np.random.default_rng(10), 20, 4, ties=False)
    staged = StagedFaissIndex(built("IVF3,Flat", METRICS[0], data))
    staged.search(data[:3], 2)
    stages = staged.stages(data[:2], 2)
    next(stages)
    del stages  # left early
    assert len(freed) == 5


def test_stages_already_seen_do_not_change() -> None:
    data = vectors(np.random.default_rng(8), 64, 4, ties=False)
    stages = StagedFaissIndex(built("Flat", METRICS[0], data)).stages(data[60], 3)
    first = next(stages)
    kept = first.ids.copy()
    rest = list(stages)
    np.testing.assert_array_equal(first.ids, kept)
    assert rest[-1].ids[0, 0] == 60


def test_many_threads_search_at_once() -> None:
    data = vectors(np.random.default_rng(9), 400, 8, ties=True)
    index = built("IVF6,Flat", faiss.METRIC_L2, data)
    index.nprobe = 5
    staged = StagedFaissIndex(index)
    expected = index.search(data, 5)
    found: list[Any] = [None] * 4

    def search(worker: int) -> None:
        mine = data[worker::4]
        found[worker] = np.concatenate([staged.search(one, 5)[1] for one in mine])

    threads = [threading.Thread(target=search, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(4):
        np.testing.assert_array_equal(found[worker], expected[1][worker::4])


@pytest.mark.parametrize(
    ("stages", "full", "expected"),
    [
        (4, 64, [8, 16, 32, 64]),
        (4, 3, [1, 2, 3]),
        (1, 64, [64]),
        (4, 0, [0]),
        ((1, 4, 100), 16, [1, 4, 16]),
        ((), 16, [16]),
    ],
)
def test_schedules(stages: Any, full: int, expected: list[int]) -> None:
    assert efforts(stages, full) == expected
