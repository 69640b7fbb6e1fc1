"""Time and memory of opening a store that holds many chunks.

    python -m examples.benchmarks.store_open --chunks 100000

The records are generated, and the files are sparse: opening never looks into them. Each
round is a fresh process that opens the store, builds the tier manager on it, and asks
the kernel for its memory: what it has on its own (``RssAnon``) and the peak, which also
counts the pages of the index that are mapped (``VmHWM``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.benchmarks.common import Spread, output_arguments
from examples.benchmarks.report import Run
from pcr_core.index.chunk import ChunkLayout, LayerShape, Namespace, chunk_keys
from pcr_core.tiers import ChunkStore, HostPool, InlineIo, SlabPlan, TierManager
from pcr_core.tiers.store.chunk_file import ChunkFormat, chunk_path
from pcr_core.tiers.store.chunk_index import ChunkIndex
from pcr_core.tiers.store.records import Record

LAYOUT = ChunkLayout((LayerShape(3, 64, 64),) * 30, 64, "BF16", 2)
NAMESPACE = Namespace.of([("benchmark", b"store_open")])
FORMAT = ChunkFormat(LAYOUT, NAMESPACE)
PATH_CHUNKS = 20
PARTS = ("store", "manager", "cpu")
BUDGET = 2**60


def build(folder: Path, chunks: int) -> None:
    """A store of prompts of 20 chunks that share their first one."""
    ChunkStore(folder, BUDGET).close()
    index = ChunkIndex.acquire(folder)
    with index.turn(), index.write() as txn:
        count = 0
        while count < chunks:
            tokens = [0] * 64 + [count] * 64 * (PATH_CHUNKS - 1)
            keys = chunk_keys(NAMESPACE, tokens, 64)
            lineage = [NAMESPACE.root, *keys]
            for depth, key in enumerate(keys[: chunks - count + (count > 0)]):
                if txn.get(key) is not None:
                    continue
                stamp = count + PATH_CHUNKS - depth
                record = Record(lineage[depth], FORMAT.file_nbytes, stamp, bytes(16))
                txn.put(key, record, lineage[: depth + 1])
                with open(chunk_path(folder / "chunks", key), "wb") as file:
                    file.truncate(FORMAT.file_nbytes)
                count += 1
    index.release()


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this kernel does not report {name}")


def open_once(folder: Path) -> dict[str, float]:
    gc.collect()
    before, resident = memory("RssAnon"), memory("VmRSS")
    cpu = time.process_time()
    start = time.perf_counter()
    store = ChunkStore(folder, BUDGET)
    opened = time.perf_counter()
    pool = HostPool(LAYOUT, SlabPlan(1, LAYOUT.nbytes))
    manager = TierManager(LAYOUT, NAMESPACE, pool, store, InlineIo(store))
    ready = time.perf_counter()
    cpu = time.process_time() - cpu
    gc.collect()
    figures = {
        "store": opened - start,
        "manager": ready - opened,
        "cpu": cpu,
        "kept": memory("RssAnon") - before,
        "peak": memory("VmHWM") - resident,
        "chunks": manager.snapshot().ssd_chunks,
    }
    manager.close()
    return figures


def in_child(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "examples.benchmarks.store_open"]
    command += ["--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=7)
    output_arguments(parser)
    parser.add_argument("--folder", type=Path, help="internal")
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(open_once(options.folder)))
        return
    with Run("store_open", options) as run:
        measure(run)


def measure(run: Run) -> None:
    """Each size in turn."""
    rows = []
    for chunks in run.options.chunks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "kv")
            build(folder, chunks)
            index = os.stat(folder / "index" / "data.mdb").st_size
            rounds = [in_child(folder) for _ in range(run.options.rounds)]
        assert {one["chunks"] for one in rounds} == {chunks}
        run.figures[str(chunks)] = rounds
        both = Spread.of([one["store"] + one["manager"] for one in rounds])
        parts = [Spread.of([one[name] for one in rounds]).ms() for name in PARTS]
        sizes = [Spread.of([one[n] for one in rounds]).median for n in ("kept", "peak")]
        per_chunk = [f"{size / chunks:.0f}" for size in (*sizes, index)]
        rows.append([f"{chunks}", both.ms(), *parts, *per_chunk])
    head = ("chunks", "open", "store", "manager", "CPU time", "kept", "peak", "index")
    run.table(head, rows, "ms: median (quartiles); memory in bytes per chunk")


if __name__ == "__main__":
    main()
