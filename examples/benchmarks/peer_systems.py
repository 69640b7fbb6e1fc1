"""What ``peers.py`` measures, and how each is started: as its makers advise.

Every system gets the model, the dtype and the number of threads of all others, and
memory for a quarter of the tokens that the stream asks about. What was chosen is in
``Launch.settings``, which the benchmark prints. Starts nothing itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.benchmarks.systems import vllm_environment

BLOCK = 32  # tokens of a block of vLLM: the smallest of its CPU kernels
LMCACHE_CHUNK = 256  # tokens, LMCache's default
KVBOOST_CHUNK = 128  # tokens, kvboost's default
GIB = 2**30
_GGML_F32 = 0
_SERVERS = "examples.benchmarks.environments"


@dataclass(frozen=True)
class Bench:
    """What all systems of one run have in common.

    Attributes:
        model: Folder of the model.
        gguf: The file that the model was converted from, for llama.cpp.
        gguf_f32: The same weights, unpacked to float32.
        dtype: ``"bfloat16"`` or ``"float32"``.
        threads: Threads of each system, one per core.
        window: Longest prompt and answer together, in tokens.
        budget: Tokens whose KV a system may keep in memory.
        working_set: Tokens whose KV a cache without limit would keep.
        token_bytes: Bytes of one token's KV in ``dtype``.
        environments: Folder of the peers' environments.
        folder: For what systems keep on disk.
        logs: For what they print.
    """

    model: str
    gguf: Path | None
    gguf_f32: Path | None
    dtype: str
    threads: int
    window: int
    budget: int
    working_set: int
    token_bytes: int
    environments: Path
    folder: Path
    logs: Path

    @property
    def budget_bytes(self) -> int:
        return self.budget * self.token_bytes


@dataclass(frozen=True)
class Launch:
    """How one system is started.

    Attributes:
        command: What to run.
        env: Added to the environment of this process.
        settings: What to print about it.
        store: Folder that outlives it, if it has one.
    """

    command: list[str]
    env: dict[str, str]
    settings: dict[str, Any]
    store: Path | None = None


@dataclass(frozen=True)
class Peer:
    """One system.

    Attributes:
        name: In tables and for ``--systems``.
        about: What it is, for people.
        launch: How it is started.
        environment: Its folder below ``Bench.environments``; none for our own.
    """

    name: str
    about: str
    launch: Callable[[Bench], Launch]
    environment: str | None = None

    def missing(self, bench: Bench) -> str | None:
        """Why it cannot take part, and what to do about it; None if it can."""
        if self.environment is None:
            return None
        folder = bench.environments / self.environment
        if not (folder / "made.stamp").is_file():  # or it is half built
            return f"{folder} is not complete; `make .bench/{folder.name}` builds it"
        if self.environment == "llama" and bench.gguf is None:
            return "no GGUF file of this model; name one with --gguf"
        return None


def python(bench: Bench, environment: str) -> Path:
    """Interpreter of an environment."""
    return bench.environments / environment / "bin" / "python"


# --- ours and transformers: in the environment of this process ---


def ours(bench: Bench) -> Launch:
    store = bench.folder / "ours"
    settings = {
        "model": bench.model,
        "cache_dir": str(store),
        "dtype": bench.dtype,
        "threads": bench.threads,
        "dram_bytes": bench.budget_bytes,
    }
    return Launch(_served("engine", settings), {}, settings, store)


def transformers(bench: Bench) -> Launch:
    return _stock(bench, 0)


def by_hand(bench: Bench) -> Launch:
    return _stock(bench, bench.budget)


def _stock(bench: Bench, kept: int) -> Launch:
    settings = {
        "model": bench.model,
        "dtype": bench.dtype,
        "threads": bench.threads,
        "kept_tokens": kept,
    }
    return Launch(_served("stock", settings), {}, settings)


def _served(which: str, settings: dict[str, Any]) -> list[str]:
    module = "examples.benchmarks.served"
    return [sys.executable, "-m", module, which, json.dumps(settings)]


# --- llama.cpp ---


def llama(bench: Bench) -> Launch:
    """Its cache in memory; KV in float16, its default: half as many bytes a token."""
    per_token = bench.token_bytes * 2 // _size(bench.dtype)
    cache = {"capacity_bytes": bench.budget * per_token}
    return _llama(bench, bench.gguf, {"cache": cache})


def llama_disk(bench: Bench) -> Launch:
    """Its cache on disk, large enough for all; none in memory but its context."""
    store = bench.folder / "llama.cpp"
    cache = {"cache_dir": str(store), "capacity_bytes": 20 * GIB}
    return _llama(bench, bench.gguf, {"cache": cache}, store)


def llama_f32(bench: Bench) -> Launch:
    """Weights and KV in float32, as those of all others."""
    per_token = bench.token_bytes * 4 // _size(bench.dtype)
    cache = {"capacity_bytes": bench.budget * per_token}
    more = {"cache": cache, "type_k": _GGML_F32, "type_v": _GGML_F32}
    return _llama(bench, bench.gguf_f32, more)


def _llama(
    bench: Bench, weights: Path | None, more: dict[str, Any], store: Path | None = None
) -> Launch:
    settings = {
        "model_path": str(weights),
        "n_ctx": bench.window,
        "n_threads": bench.threads,
        "n_threads_batch": bench.threads,
        "seed": 0,
        **more,
    }
    command = _server(bench, "llama", "llama_server", settings)
    return Launch(command, {}, settings, store)


# --- vLLM and LMCache ---


def vllm(bench: Bench) -> Launch:
    settings = _vllm_settings(bench, bench.budget)
    command = _server(bench, "vllm", "vllm_server", settings)
    env = vllm_environment(python(bench, "vllm"), bench.threads)
    return Launch(command, env, settings)


def lmcache(bench: Bench) -> Launch:
    """vLLM's own pool just holds one request; LMCache has the budget, and a disk."""
    store = bench.folder / "lmcache"
    # It evicts from 80 % on: so much more, that the budget is what it keeps.
    memory = bench.budget_bytes / 0.8
    settings = {
        "vllm": _vllm_settings(bench, bench.window),
        "lmcache": {
            "chunk-size": LMCACHE_CHUNK,
            "l1-size-gb": round(memory / GIB, 3),
            "no-l1-use-lazy": True,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "engine_driven",
            "shm-name": f"bench-{os.getpid()}",
            "worker-reap-timeout-seconds": 0,  # it is stopped between its turns
            "disable-observability": True,
            "l2-adapter": json.dumps({"type": "fs", "base_path": str(store)}),
        },
    }
    command = _server(bench, "lmcache", "lmcache_server", settings)
    env = vllm_environment(python(bench, "lmcache"), bench.threads)
    return Launch(command, {**env, "DO_NOT_TRACK": "1"}, settings, store)


def _vllm_settings(bench: Bench, tokens: int) -> dict[str, Any]:
    """vLLM's arguments; its manual gives whole GiB, so the pool is told in blocks.

    One block more than fits: vLLM keeps one to itself.
    """
    return {
        "model": bench.model,
        "dtype": bench.dtype,
        "enable_prefix_caching": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": -(-tokens // BLOCK) + 1,
        "max_model_len": bench.window,
        "seed": 0,
    }


# --- kvboost ---


def kvboost(bench: Bench) -> Launch:
    store = bench.folder / "kvboost"
    settings = {
        "model": bench.model,
        "dtype": bench.dtype,
        "threads": bench.threads,
        "engine": {
            "max_cache_bytes": bench.budget_bytes,
            "chunk_size": KVBOOST_CHUNK,
            # Its disk holds twice as many: all that the stream asks about.
            "max_chunks": bench.working_set // KVBOOST_CHUNK + 1,
            "disk_cache_dir": str(store),
        },
    }
    command = _server(bench, "kvboost", "kvboost_server", settings)
    return Launch(command, {}, settings, store)


def _server(
    bench: Bench, environment: str, module: str, settings: dict[str, Any]
) -> list[str]:
    interpreter = str(python(bench, environment))
    return [interpreter, "-m", f"{_SERVERS}.{module}", json.dumps(settings)]


def _size(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]


OURS = "ours"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "this engine, DRAM and SSD", ours),
        Peer("transformers", "no cache", transformers),
        Peer("by hand", "a DynamicCache per prefix, the last used kept", by_hand),
        Peer("llama.cpp", "the GGUF file, LlamaRAMCache", llama, "llama"),
        Peer("llama.cpp disk", "the GGUF file, LlamaDiskCache", llama_disk, "llama"),
        Peer("llama.cpp f32", "unpacked weights, LlamaRAMCache", llama_f32, "llama"),
        Peer("vllm", "automatic prefix caching", vllm, "vllm"),
        Peer("vllm+lmcache", "LMCache's server, memory and disk", lmcache, "lmcache"),
        Peer("kvboost", "its defaults, memory and disk", kvboost, "kvboost"),
    )
}


def present(names: list[str], bench: Bench) -> Iterator[Peer]:
    """The systems that can take part; says which cannot, and why."""
    for name in names:
        reason = PEERS[name].missing(bench)
        if reason is None:
            yield PEERS[name]
        else:
            print(f"LEFT OUT: {name}: {reason}")
