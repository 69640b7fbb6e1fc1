"""``StagedFaissIndex``: a FAISS index that says early what it will probably find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

from pcr_core import ConfigError, RequestError
from pcr_integrations.retrieval._heaps import Distances, Ids
from pcr_integrations.retrieval._kinds import Begin, begin_for
from pcr_integrations.retrieval._schedule import Stages, checked


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What has been found by the end of one stage.

    Attributes:
        number: Of this stage, from 1.
        of: How many there are.
        effort: What has been searched so far: inverted lists, rows, or ``efSearch``.
        distances: ``[queries, k]``, float32, best first.
        ids: ``[queries, k]``, int64; -1 where fewer than ``k`` were found.
    """

    number: int
    of: int
    effort: int
    distances: Distances
    ids: Ids

    @property
    def last(self) -> bool:
        """Whether this is the result of the whole search."""
        return self.number == self.of


class StagedFaissIndex:
    """Searches a FAISS index in stages; the last one equals ``index.search``.

    The staged vector search of RAGCache (arXiv 2404.12457, section 5.3): what one stage
    finds is usually what the last one finds, so the work that follows a retrieval can
    begin before it has ended.

    - **IVF** (Flat, scalar quantizer, PQ): in growing ``nprobe``; every list is scanned
      once. The stages cost together what one search costs, and some ten microseconds of
      Python for each list.
    - **Flat**: in growing numbers of rows, each scanned once; in one stage for a ``k``
      of 100 or more.
    - **HNSW**: in growing ``efSearch``; each stage is a search of its own.

    Each stage has the exact best ``k`` of what it has searched (HNSW: what the plain
    search with that ``efSearch`` finds). Distances, ids and their order among equals
    are those of FAISS, for L2 and inner product, in an ``IndexIDMap`` or behind the
    transformations of an ``IndexPreTransform``, too. ``nprobe`` and ``efSearch`` are
    the index's own, read anew at each search. Where ``parallel_mode`` of an IVF index
    is not 0, plain searches break ties by chance, and this one does not.

    Any number of threads may search at once; FAISS releases the GIL while it computes.
    As for FAISS itself, nobody may add, remove or train meanwhile: from the first to
    the last step of the iterator. The index is shared, not copied.

    Args:
        index: A trained FAISS index on the CPU.
        stages: How many: 4 means an eighth, a quarter, half, and all of the effort. Or
            the effort by the end of each stage but the last, for instance ``(1, 4)``.

    Raises:
        ConfigError: For another object or kind of index, or a schedule that is none.

    Example:
        >>> staged = StagedFaissIndex(index)                       # doctest: +SKIP
        >>> for stage in staged.stages(query, k=3):                # doctest: +SKIP
        ...     print(stage.effort, stage.ids[0])
    """

    def __init__(self, index: Any, *, stages: Stages = 4) -> None:
        if not isinstance(index, faiss.Index):
            raise ConfigError(
                f"StagedFaissIndex takes a faiss.Index, not {type(index).__name__}"
            )
        self._index = index  # owns whatever is inside
        self._schedule = checked(stages)
        self._layers = _layers(index)
        self._kind, self._begin = begin_for(self._layers[-1])

    @property
    def index(self) -> Any:
        """The FAISS index."""
        return self._index

    @property
    def kind(self) -> str:
        """``"ivf"``, ``"flat"`` or ``"hnsw"``."""
        return self._kind

    @property
    def higher_is_better(self) -> bool:
        """Whether distances are inner products."""
        return bool(self._index.metric_type == faiss.METRIC_INNER_PRODUCT)

    def stages(self, queries: Any, k: int) -> Iterator[Stage]:
        """Search in stages. Arguments are checked at once, not at the first step.

        Args:
            queries: ``[queries, dimensions]`` or ``[dimensions]``, numbers.
            k: How many to find for each query; may exceed the size of the index.

        Returns:
            An iterator with one ``Stage`` after each stage. It may be left early.

        Raises:
            RequestError: For queries of another shape or type, or a ``k`` below 1.
            ConfigError: If the index is not trained.
        """
        batch = self._checked(queries)
        if isinstance(k, bool) or not hasattr(k, "__index__") or int(k) < 1:
            raise RequestError(f"k must be an integer of at least 1, not {k!r}")
        return self._run(self._begin, batch, int(k))

    def search(self, queries: Any, k: int) -> tuple[Distances, Ids]:
        """Search to the end; arguments and errors are those of ``stages``.

        Returns:
            Distances and ids, ``[queries, k]`` each.
        """
        *_, last = self.stages(queries, k)
        return last.distances, last.ids

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def __repr__(self) -> str:
        return (
            f"<StagedFaissIndex {self._kind}, {len(self)} vectors of {self._index.d} "
            f"dimensions, stages {self._schedule}>"
        )

    def _checked(self, queries: Any) -> Distances:
        if not self._index.is_trained:
            raise ConfigError("the index is not trained; call index.train(vectors)")
        try:
            batch = np.ascontiguousarray(queries, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise RequestError(f"queries are no array of numbers: {error}") from error
        batch = batch[None] if batch.ndim == 1 else batch
        if batch.ndim != 2 or batch.shape[1] != self._index.d or not len(batch):
            raise RequestError(
                f"queries have shape {batch.shape}, but the index takes [queries, "
                f"{self._index.d}]; use the model that has embedded the documents"
            )
        return batch

    def _run(self, begin: Begin, batch: Distances, k: int) -> Iterator[Stage]:
        for outer in self._layers[:-1]:
            batch = _transformed(outer, batch)
        search = begin(self._layers[-1], batch, k, self._schedule)
        for number, effort in enumerate(search.efforts, start=1):
            distances, ids = search.advance(effort)
            for outer in reversed(self._layers[:-1]):
                ids = _named(outer, ids)
            yield Stage(number, len(search.efforts), effort, distances, ids)


def _layers(index: Any) -> list[Any]:
    """An index and those inside it, outermost first."""
    layers: list[Any] = [faiss.downcast_index(index)]
    while type(layers[-1]) in (
        faiss.IndexIDMap,
        faiss.IndexIDMap2,
        faiss.IndexPreTransform,
    ):
        layers.append(faiss.downcast_index(layers[-1].index))
    return layers


def _transformed(outer: Any, batch: Distances) -> Distances:
    """What the index inside ``outer`` is asked."""
    if type(outer) is faiss.IndexPreTransform:
        chain: Any = outer.chain
        for position in range(chain.size()):
            transform = faiss.downcast_VectorTransform(chain.at(position))
            batch = transform.apply(batch)
    return batch


def _named(outer: Any, ids: Ids) -> Ids:
    """Ids of ``outer`` for those of the index inside it."""
    if type(outer) is faiss.IndexPreTransform or not outer.ntotal:
        return ids
    names = faiss.vector_to_array(outer.id_map)
    return np.where(ids < 0, ids, names[ids])
