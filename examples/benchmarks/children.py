"""Systems under test as child processes, of which one at a time runs.

Every system is a process of its own, with its own interpreter where it needs one: two
teams of OpenMP threads in one process, or two that spin at once, slow each other down
several times. A child reads one JSON object per line and answers each with one line:

    {"prompt": [ids], "max_tokens": n, "prefix": n}
    {"first": seconds, "last": seconds, "tokens": [ids], "cached": {"tier": tokens}}

``first`` and ``last`` are the seconds from the request to its first and last token,
taken inside the child. ``prefix`` is how many tokens an application that keeps KV by
hand would keep; systems with a prefix cache do not look at it. The first line that a
child writes describes it. Between its turns a child is stopped (``SIGSTOP``), with all
processes that it started.

Knows nothing of what the systems are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.benchmarks.proc import TICK, busy, group, machine_busy, stat

CALM = 0.1  # seconds without a tick of CPU time after which a child counts as idle
LONGEST = 10.0  # seconds to wait for that
_DIE_WITH_PARENT = (1, signal.SIGKILL)  # prctl(PR_SET_PDEATHSIG, ...)


@dataclass(frozen=True)
class Answer:
    """What one request took.

    Attributes:
        first: Seconds to the first token.
        last: Seconds to the last token.
        tokens: What was generated.
        cached: Prompt tokens reused, by the place they were found in.
        computed: Prompt tokens that went through the model.
    """

    first: float
    last: float
    tokens: list[int]
    cached: dict[str, int]
    computed: int

    @property
    def step(self) -> float:
        """Seconds from one token to the next."""
        return (self.last - self.first) / (len(self.tokens) - 1)


class Child:
    """One system in a process of its own; use as a context manager.

    It is stopped whenever it has no ``turn``.

    Attributes:
        name: For messages.
        about: What it said about itself.
        ready: Seconds from the start of its process until it said so.
        others: Cores that other work, or the host of this machine, took from it in its
            last turn, on average.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            name: For messages.
            command: What to run.
            env: Added to the environment of this process.
            log: File for what it writes to standard error.

        Raises:
            SystemExit: If it ends before it is ready.
        """
        self.name = name
        self.others = 0.0
        self._log = log
        libc = ctypes.CDLL(None)
        start = time.monotonic()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
                start_new_session=True,  # a group of its own, to stop all it starts
                # Stopped, it would not notice that its input has ended.
                preexec_fn=lambda: libc.prctl(*_DIE_WITH_PARENT),
            )
        self.about: dict[str, Any] = self._read()
        self.ready = time.monotonic() - start
        self._rest()

    def generate(self, prompt: list[int], max_tokens: int, prefix: int = 0) -> Answer:
        """Answer one prompt; only within a ``turn``."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "prefix": prefix}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _read tells what became of it
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        found = self._read()
        if len(found["tokens"]) != max_tokens:
            raise SystemExit(f"{self.name} stopped after {len(found['tokens'])} tokens")
        return Answer(**found, computed=len(prompt) - sum(found["cached"].values()))

    @contextlib.contextmanager
    def turn(self) -> Iterator[Child]:
        """Let it run; afterwards wait until it is idle and stop it again."""
        start, machine, mine = time.monotonic(), machine_busy(), self._busy()
        os.killpg(self._process.pid, signal.SIGCONT)
        yield self
        self._rest()
        taken = machine_busy() - machine - (self._busy() - mine)
        self.others = max(0.0, taken / TICK / (time.monotonic() - start))

    def peak_bytes(self) -> int:
        """Largest resident sizes so far of it and all it started, summed."""
        total = 0
        for pid in self._group():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found = [line.split()[1] for line in lines if line[:6] == "VmHWM:"]
                total += sum(map(int, found)) * 1024
        return total

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)  # end of input: it leaves by itself

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self.name} ended; its last words:\n{end}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _group(self) -> list[int]:
        return group(self._process.pid)

    def _busy(self) -> int:
        """CPU time of the group so far, in ticks."""
        return busy(self._group())

    def _rest(self) -> None:
        limit = time.monotonic() + LONGEST
        before = self._busy()
        while True:
            time.sleep(CALM)
            now = self._busy()
            if now == before:
                break
            if time.monotonic() > limit:
                spent = (now - before) / TICK / CALM
                print(f"WARNING: idle, {self.name} still keeps {spent:.1f} cores busy")
                break
            before = now
        os.killpg(self._process.pid, signal.SIGSTOP)
        while any(_state(pid) not in "TZ" for pid in self._group()):
            time.sleep(0.001)  # the signal takes effect when it is delivered


def _state(pid: int) -> str:
    """``"T"`` for stopped; ``"Z"`` also where it has ended meanwhile."""
    with contextlib.suppress(OSError):
        return stat(pid)[0]
    return "Z"
