"""The guard that keeps the suite off the network does guard."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_internet_sockets_are_blocked(family):
    with pytest.raises(RuntimeError, match="no test may use the network"):
        socket.socket(family)


def test_the_default_family_is_blocked():
    with pytest.raises(RuntimeError, match="no test may use the network"):
        socket.create_connection(("127.0.0.1", 9))


def test_name_lookup_is_blocked():
    with pytest.raises(RuntimeError, match=r"example\.invalid"):
        socket.getaddrinfo("example.invalid", 80)


def test_unix_sockets_work():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"hello")
        assert theirs.recv(5) == b"hello"


def test_child_processes_are_guarded_too():
    script = "import socket; socket.socket(socket.AF_INET)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "NetworkBlockedError" in done.stderr
