"""CPU time of processes and of the machine, from ``/proc``; Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

TICK: int = os.sysconf("SC_CLK_TCK")
"""Ticks of CPU time in a second."""


def stat(pid: int) -> list[str]:
    """Fields of ``/proc/pid/stat`` from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def machine_busy() -> int:
    """Ticks so far in which a core was not idle, or was taken away by the host."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, fields)
    return user + nice + system + irq + softirq + steal


def busy(pids: Iterable[int]) -> int:
    """Ticks that these processes have run so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, stat(pid)[11:13]))
    return total


def group(leader: int) -> list[int]:
    """All processes of the group that ``leader`` leads."""
    return [pid for pid, fields in _all() if int(fields[2]) == leader]


def tree_busy(root: int) -> int:
    """Ticks that a process, and all that it started, have run so far.

    Those that have ended count for whoever waited for them, as the kernel has it.
    """
    fields = dict(_all())
    children: dict[int, list[int]] = {}
    for pid, found in fields.items():
        children.setdefault(int(found[1]), []).append(pid)
    total, left = 0, [root]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        total += sum(map(int, fields[pid][11:15])) if pid in fields else 0
    return total


def _all() -> list[tuple[int, list[str]]]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(name), stat(int(name))))
    return found
