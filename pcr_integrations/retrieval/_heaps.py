"""The best ``k`` so far of every query, kept as FAISS keeps them.

FAISS fills a heap by scanning codes, and what it keeps of equal distances depends on
the order of the scan. Scanning the same codes in the same order into the same heap,
with pauses between the stages, therefore gives the same result, ties included.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

Distances = NDArray[np.float32]
Ids = NDArray[np.int64]

_WORST = np.finfo(np.float32).max


class Heaps:
    """One heap for each query. One thread at a time.

    Args:
        index: The IVF index whose scanners compute the distances.
        queries: ``[queries, dimensions]``, float32, C-contiguous.
        k: Size of a heap.
    """

    def __init__(self, index: Any, queries: Distances, k: int) -> None:
        self._similarity = index.metric_type == faiss.METRIC_INNER_PRODUCT
        self._shape = (len(queries), k)
        worst = -_WORST if self._similarity else _WORST
        self._distances = np.full(self._shape, worst, dtype=np.float32)
        self._ids = np.full(self._shape, -1, dtype=np.int64)
        self._scanners = [_Scanner(index, query) for query in queries]

    def scan(
        self, query: int, part: int, coarse: float, count: int, codes: Any, ids: Any
    ) -> None:
        """Take in ``count`` codes. FAISS releases the GIL meanwhile.

        Args:
            query: Which query.
            part: Number of the inverted list that they are in.
            coarse: Distance of the query to that list's centroid.
            count: How many.
            codes: Pointer to the codes.
            ids: Pointer to their ids.
        """
        scanner = self._scanners[query].scanner
        scanner.set_list(part, coarse)
        scanner.scan_codes(
            count,
            codes,
            ids,
            faiss.swig_ptr(self._distances[query]),
            faiss.swig_ptr(self._ids[query]),
            self._shape[1],
        )

    def best(self) -> tuple[Distances, Ids]:
        """Copies in the order in which FAISS returns them, ``[queries, k]`` each."""
        sign = -1 if self._similarity else 1
        empty = self._ids < 0
        order = np.lexsort((sign * self._ids, sign * self._distances, empty), axis=1)
        return (
            np.take_along_axis(self._distances, order, axis=1),
            np.take_along_axis(self._ids, order, axis=1),
        )


class _Scanner:
    """Computes distances to one query, and is freed with its wrapper.

    FAISS hands over a new object without its ownership, and taking it with ``thisown``
    upsets the reference counts of SWIG (seen in 1.15.1), so it is freed by name.

    Attributes:
        scanner: The ``InvertedListScanner``.
    """

    def __init__(self, index: Any, query: Distances) -> None:
        self.scanner: Any = index.get_InvertedListScanner(False, None, None)
        self._query = query  # the scanner points into it
        self.scanner.set_query(faiss.swig_ptr(query))

    def __del__(self) -> None:
        scanner = getattr(self, "scanner", None)  # none where FAISS refused
        if scanner is not None:
            type(scanner).__swig_destroy__(scanner)
