"""Blocks Internet sockets in this process; Unix sockets stay.

``tests/conftest.py`` calls ``block()`` in pytest's own process and puts this folder on
``PYTHONPATH``, where Python's ``site`` imports this file in every child process too.
"""

import socket


class NetworkBlockedError(RuntimeError):
    """A test, or the library under test, tried to reach the network.

    Not an ``OSError``: client code catches those and retries in silence.
    """


class _UnixOnlySocket(socket.socket):
    def __init__(self, family=-1, type=-1, proto=-1, fileno=None):
        # With a file number the socket exists already (accept, socketpair).
        if fileno is None and family != socket.AF_UNIX:
            raise NetworkBlockedError(
                f"a socket of family {family} was opened: no test may use the network"
            )
        super().__init__(family, type, proto, fileno)


def _no_lookup(host, *_args, **_kwargs):
    raise NetworkBlockedError(f"{host!r} was looked up: no test may use the network")


def block() -> None:
    """Make Internet sockets and name look-ups raise; calling it twice is harmless."""
    socket.socket = _UnixOnlySocket
    socket.getaddrinfo = _no_lookup
    socket.gethostbyname = _no_lookup


block()
