"""What backing the DRAM tier with huge pages is worth.

    python -m examples.benchmarks.huge_pages

One slab of chunks, first with pages of the usual size, then with huge ones, in turn.
Per chunk: the first write to fresh memory, populating it in an idle moment, writing
what was populated, and reading chunks in random order; and a layer of eight chunks in a
row, as a request loads it. One thread.
"""

from __future__ import annotations

import argparse
import mmap
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from examples.benchmarks.common import Spread, output_arguments, ratios
from examples.benchmarks.report import Run
from pcr_core.index.chunk import ChunkLayout, LayerShape
from pcr_core.tiers import HostPool, Slot
from pcr_core.tiers.slabs import Slab, SlabPlan

LAYOUT = ChunkLayout((LayerShape(3, 64, 64),) * 30, 128, "BF16", 2)
RUN = 8
KINDS = ("usual", "huge")


def usual_pages(nbytes: int) -> Slab:
    slab = Slab(nbytes)
    memory: Any = slab.bytes.obj
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return slab


def mean(items: Iterable[Any], work: Callable[[Any], object]) -> float:
    items = list(items)
    start = time.perf_counter()
    for item in items:
        work(item)
    return (time.perf_counter() - start) / len(items)


def measure(new_slab: Callable[[int], Slab]) -> dict[str, float]:
    plan = SlabPlan.within(256 * 2**20, LAYOUT.nbytes)
    pool = HostPool(LAYOUT, plan, new_slab=new_slab)
    chunk = torch.ones(LAYOUT.nbytes, dtype=torch.uint8)
    half = pool.capacity // 2

    def write(slot: Slot) -> None:
        torch.frombuffer(slot.view, dtype=torch.uint8).copy_(chunk)

    def read(slot: Slot) -> None:
        chunk.copy_(torch.frombuffer(slot.view, dtype=torch.uint8))

    slots = [pool.allocate() for _ in range(half)]
    found = {"first write": mean(slots, write)}
    found["populate"] = mean(
        range(half, pool.capacity), lambda _: pool.populate_next(pool.nbytes)
    )
    rest = [pool.allocate() for _ in range(half, pool.capacity)]
    found["write populated"] = mean(rest, write)
    slots += rest
    mixed = random.Random(0).sample(slots, len(slots))
    found["read"] = mean(mixed, read)
    row = torch.zeros(3, RUN, LAYOUT.chunk_tokens, 64, dtype=torch.bfloat16)
    loads = [(slot, i) for i in range(30) for slot in slots[: len(slots) - RUN : RUN]]
    found["load a layer of 8"] = mean(
        loads, lambda load: row.transpose(0, 1).copy_(load[0].span(RUN, load[1])[0])
    )
    pool.close()
    return found


def measure_both(run: Run) -> None:
    """Each kind of pages in turn, in every round."""
    results: dict[str, Any] = run.figures
    results.update({kind: [] for kind in KINDS})
    for _ in range(run.options.rounds):
        for kind, source in zip(KINDS, (usual_pages, Slab), strict=True):
            results[kind].append(measure(source))
    rows = []
    for name in results["huge"][0]:
        usual, huge = ([one[name] for one in results[kind]] for kind in KINDS)
        micro = [f"{Spread.of(one).median * 1e6:.0f}" for one in (usual, huge)]
        rows.append([name, *micro, f"{ratios(huge, usual).median:.2f}"])
    title = f"microseconds per chunk of {LAYOUT.nbytes} bytes; medians"
    run.table(("", "usual pages", "huge pages", "ratio"), rows, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    output_arguments(parser)
    parser.set_defaults(threads=1)
    with Run("huge_pages", parser.parse_args()) as run:
        measure_both(run)


if __name__ == "__main__":
    main()
