"""How each kind of FAISS index is searched in stages.

Three kinds, one protocol. IVF lists are visited nearest first and Flat rows in their
order, each once, so that all stages together do the work of one plain search. An HNSW
graph keeps no state between searches: there every stage is a whole search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import faiss
import numpy as np

from pcr_core import ConfigError
from pcr_integrations.retrieval._heaps import Distances, Heaps, Ids
from pcr_integrations.retrieval._schedule import Stages, efforts

_IVF = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
_FLAT = (faiss.IndexFlat, faiss.IndexFlatL2, faiss.IndexFlatIP)
_HNSW = (faiss.IndexHNSWFlat, faiss.IndexHNSWSQ, faiss.IndexHNSWPQ)


class Search(Protocol):
    """One batch of queries on its way through the stages."""

    @property
    def efforts(self) -> Sequence[int]:
        """By the end of each stage: lists searched, rows searched, or ``efSearch``."""

    def advance(self, effort: int) -> tuple[Distances, Ids]:
        """Search up to ``effort``; return distances and ids, ``[queries, k]`` each."""


Begin = Callable[[Any, Distances, int, Stages], Search]
"""Starts a search: index, queries, k, schedule."""


def begin_for(index: Any) -> tuple[str, Begin]:
    """Return the kind of an index, ``"ivf"``, ``"flat"`` or ``"hnsw"``, and its search.

    Exact types: a subclass may search in a way of its own.

    Raises:
        ConfigError: If there is no search in stages for it.
    """
    if type(index) in _IVF:
        if index.max_codes or index.invlists.use_iterator:
            raise ConfigError(
                "an IVF index with max_codes, or with inverted lists that are only "
                "iterable, cannot be searched in stages; set max_codes = 0 and keep "
                "the lists in memory"
            )
        return "ivf", IvfSearch
    if type(index) in _FLAT:
        if index.metric_type in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
            return "flat", flat_search
        raise ConfigError(
            "StagedFaissIndex knows L2 distance and inner product; use one of them"
        )
    if type(index) in _HNSW:
        return "hnsw", HnswSearch
    raise ConfigError(
        f"{type(index).__name__} cannot be searched in stages; take IndexIVFFlat, "
        "IndexIVFScalarQuantizer, IndexIVFPQ, IndexFlat or IndexHNSW (Flat, SQ, PQ), "
        "alone or in an IndexIDMap or IndexPreTransform"
    )


class IvfSearch:
    """Inverted lists, nearest first; an effort is a number of lists (``nprobe``)."""

    def __init__(self, index: Any, queries: Distances, k: int, stages: Stages) -> None:
        probes = min(index.nprobe, index.nlist)
        self.efforts = efforts(stages, probes)
        self._lists = index.invlists
        self._heaps = Heaps(index, queries, k)
        self._distances, self._nearest = _nearest_lists(index, queries, probes)
        self._done = 0

    def advance(self, effort: int) -> tuple[Distances, Ids]:
        """See ``Search``."""
        chosen = slice(self._done, effort)
        for query in range(len(self._nearest)):
            numbers = self._nearest[query, chosen].tolist()
            distances = self._distances[query, chosen].tolist()
            for number, distance in zip(numbers, distances, strict=True):
                self._scan(query, number, distance)
        self._done = effort
        return self._heaps.best()

    def _scan(self, query: int, number: int, distance: float) -> None:
        lists = self._lists
        count = lists.list_size(number) if number >= 0 else 0  # a NaN has no list
        if not count:
            return
        codes, ids = lists.get_codes(number), lists.get_ids(number)
        try:
            self._heaps.scan(query, number, distance, count, codes, ids)
        finally:
            lists.release_ids(number, ids)
            lists.release_codes(number, codes)


def _nearest_lists(index: Any, queries: Distances, probes: int) -> tuple[Any, Any]:
    """Distances and numbers of the nearest lists, ``[queries, probes]`` each.

    Cut into slices as the plain search does for its threads, because distances may be
    rounded otherwise in a larger batch.
    """
    quantizer = faiss.downcast_index(index.quantizer)
    slices = min(faiss.omp_get_max_threads(), len(queries))
    cuts = [len(queries) * i // slices for i in range(slices + 1)]
    found = [
        quantizer.search(queries[start:stop], probes) for start, stop in pairwise(cuts)
    ]
    return np.concatenate([d for d, _ in found]), np.concatenate([i for _, i in found])


class FlatSearch:
    """Rows in their order; an effort is a number of rows."""

    def __init__(self, index: Any, queries: Distances, k: int, stages: Stages) -> None:
        rows = index.ntotal
        self.efforts = efforts(stages, rows)
        rev_swig_ptr: Any = faiss.rev_swig_ptr
        self._rows = rev_swig_ptr(index.get_xb(), rows * index.d).view(np.uint8)
        self._width = index.d * 4
        self._ids = np.arange(rows, dtype=np.int64)
        # One list of float vectors, for its scanner: a Flat index has none.
        ivf_flat: Any = faiss.IndexIVFFlat
        coarse = faiss.IndexFlat(index.d, index.metric_type)
        self._scans = ivf_flat(coarse, index.d, 1, index.metric_type)
        self._heaps = Heaps(self._scans, queries, k)
        self._count = len(queries)
        self._done = 0

    def advance(self, effort: int) -> tuple[Distances, Ids]:
        """See ``Search``."""
        start, self._done = self._done, effort
        if effort > start:
            codes = faiss.swig_ptr(self._rows[start * self._width :])
            ids = faiss.swig_ptr(self._ids[start:])
            for query in range(self._count):
                self._heaps.scan(query, 0, 0.0, effort - start, codes, ids)
        return self._heaps.best()


class WholeSearch:
    """The plain search, in one stage."""

    def __init__(self, index: Any, queries: Distances, k: int) -> None:
        self.efforts = [index.ntotal]
        self._index, self._queries, self._k = index, queries, k

    def advance(self, effort: int) -> tuple[Distances, Ids]:
        """See ``Search``."""
        distances, ids = self._index.search(self._queries, self._k)
        return distances, ids


def flat_search(index: Any, queries: Distances, k: int, stages: Stages) -> Search:
    """Search rows in stages where FAISS scans them one by one, else all at once.

    For many queries it multiplies matrices, and for a large ``k`` it sorts out the best
    with another algorithm: cut into stages, distances or ties would differ.
    """
    limits = faiss.cvar
    one_by_one = len(queries) < limits.distance_compute_blas_threshold
    if one_by_one and k < limits.distance_compute_min_k_reservoir and index.ntotal:
        return FlatSearch(index, queries, k, stages)
    return WholeSearch(index, queries, k)


class HnswSearch:
    """Whole searches of a graph; an effort is ``efSearch``, the last the index's own.

    A search takes about as long as its ``efSearch`` is large: with the usual schedule
    all stages together take about twice as long as the plain search.
    """

    def __init__(self, index: Any, queries: Distances, k: int, stages: Stages) -> None:
        self.efforts = efforts(stages, index.hnsw.efSearch)
        self._index, self._queries, self._k = index, queries, k

    def advance(self, effort: int) -> tuple[Distances, Ids]:
        """See ``Search``."""
        if effort == self.efforts[-1]:
            distances, ids = self._index.search(self._queries, self._k)
        else:
            own = self._index.hnsw
            params = faiss.SearchParametersHNSW()  # type: ignore[attr-defined]
            params.efSearch = effort
            params.check_relative_distance = own.check_relative_distance
            params.bounded_queue = own.search_bounded_queue
            distances, ids = self._index.search(self._queries, self._k, params=params)
        return distances, ids
