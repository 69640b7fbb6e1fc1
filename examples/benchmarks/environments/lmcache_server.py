"""vLLM with LMCache's server, behind JSON lines (``answering.py``).

Runs in the environment of ``make .bench/lmcache``. Started as

    python -m examples.benchmarks.environments.lmcache_server '{"vllm": {...}, ...}'

with the arguments of ``vllm.LLM`` under ``vllm`` and those of ``lmcache server`` under
``lmcache``. LMCache inside vLLM's process finds no connector for a CPU, so its server
runs beside it, on free ports of this machine, and is ended with it. KV goes through
shared memory: ``engine_driven``, the path for engines without CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from examples.benchmarks.environments.answering import private_stdout, serve
from examples.benchmarks.environments.vllm_server import VllmServer

LONGEST = 600.0  # seconds for the server to start or to end
_DIE_WITH_PARENT = (1, signal.SIGKILL)  # prctl(PR_SET_PDEATHSIG, ...)


class LMCacheServer(VllmServer):
    """vLLM and a server of LMCache that keeps its KV."""

    def __init__(self, settings: dict[str, Any]) -> None:
        port, http = _free_ports(2)
        self._server = _start(settings["lmcache"], port, http)
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }
        self._outside = _watch_outside()
        _only_functions_of_llvm()
        super().__init__({**settings["vllm"], "kv_transfer_config": connector})
        self.about["lmcache"] = importlib.metadata.version("lmcache")

    def tiers(self, cached: int) -> dict[str, int]:
        outside = min(self._outside[-1] if self._outside else 0, cached)
        self._outside.clear()
        found = {"own memory": cached - outside, "lmcache": outside}
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._server.terminate()
        self._server.wait(LONGEST)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _start(options: dict[str, Any], port: int, http: int) -> subprocess.Popen[bytes]:
    """Start ``lmcache server`` and wait until it answers."""
    command = [str(Path(sys.executable).parent / "lmcache"), "server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-port", str(http)]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    quiet = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=quiet,
        preexec_fn=lambda: libc.prctl(*_DIE_WITH_PARENT),
    )
    limit = time.monotonic() + LONGEST
    while server.poll() is None and time.monotonic() < limit:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=5)
        except OSError:
            time.sleep(0.1)
        else:
            return server
    server.kill()
    raise SystemExit(f"lmcache server did not start: {' '.join(command)}")


def _only_functions_of_llvm() -> None:
    """Let vLLM look through all modules, that of llvmlite included.

    At its start vLLM reads ``__dict__`` of every object of every module; llvmlite,
    which LMCache brings along, answers that with a function of LLVM's library.
    """
    from llvmlite.binding.ffi import _lib_wrapper

    found = _lib_wrapper.__getattr__

    def function(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return found(self, name)

    _lib_wrapper.__getattr__ = function


def _watch_outside() -> list[int]:
    """A list that grows by the tokens that each request got from outside of vLLM."""
    from vllm.v1.metrics.stats import PrefillStats

    found: list[int] = []
    note = PrefillStats.set

    def noting(
        self: Any,
        num_prompt_tokens: int,
        num_local_cached_tokens: int,
        num_external_cached_tokens: int,
    ) -> None:
        found.append(num_external_cached_tokens)
        note(
            self, num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens
        )

    PrefillStats.set = noting
    return found


if __name__ == "__main__":
    answers = private_stdout()
    serve(LMCacheServer(json.loads(sys.argv[1])), answers)
