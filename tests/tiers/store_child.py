"""Other processes on a cache folder, driven by lines of JSON on standard input.

This process imports what is slow to import and then forks one process for each line
``[FOLDER, SSD_CHUNKS, CALL, NUMBER, WHEN]``. With the last three, that process kills
itself with SIGKILL ``before``, ``after`` or in the ``middle`` of the NUMBERth CALL of
the file seam. It answers its pid, and then a line for every line: ``[1, 2]`` serves
that prompt, ``"end"`` ends it. When it has ended, its exit code is answered.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location(
    "tier_kit", Path(__file__).with_name("conftest.py")
)
assert spec is not None
assert spec.loader is not None
kit = importlib.util.module_from_spec(spec)
sys.modules["tier_kit"] = kit
spec.loader.exec_module(kit)


class Killer(kit.FaultyFiles):
    """Dies at one call."""

    def __init__(self, call: str, number: int, when: str) -> None:
        super().__init__()
        self.call, self.number, self.when = call, number, when

    def _run(self, name: str, *args):
        due = name == self.call and self.calls[name] + 1 == self.number
        if due and self.when == "middle":
            fd, (header, data) = args
            os.write(fd, bytes(header) + bytes(data)[: len(data) // 2])
        if due and self.when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = getattr(super(), name)(*args)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open_new(self, path):
        return self._run("open_new", path)

    def writev(self, fd, buffers):
        return self._run("writev", fd, buffers)

    def fsync(self, fd):
        return self._run("fsync", fd)

    def replace(self, source, target):
        return self._run("replace", source, target)

    def fsync_folder(self, path):
        return self._run("fsync_folder", path)

    def unlink(self, path):
        return self._run("unlink", path)


def orders():
    """Lines of standard input, none read before it is wanted."""
    while True:
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(0, 1)
            if not piece:
                return
            line += piece
        yield json.loads(line)


def answer(value) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def use_folder(folder: str, chunks: int, *death) -> None:
    files = Killer(*death) if death else kit.Files()
    store = kit.ChunkStore(Path(folder), chunks * kit.FILE_BYTES, files=files)
    pool = kit.HostPool(kit.LAYOUT, kit.SlabPlan(8, kit.LAYOUT.nbytes))
    io = kit.InlineIo(store)
    manager = kit.TierManager(kit.LAYOUT, kit.NAMESPACE, pool, store, io)
    answer(os.getpid())
    for order in orders():
        if order == "end":
            break
        if order == "fork":
            answer(forked(manager))
        else:
            served = kit.serve(manager, [*kit.prompt(*order), 9])
            answer(sorted(served.tiers.items()))
    manager.close()


def main() -> None:
    for order in orders():
        pid = os.fork()
        if pid == 0:
            use_folder(*order)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        answer({"exit": os.waitstatus_to_exitcode(status)})


def forked(manager) -> str:
    """What a child made by fork gets to hear when it uses the store."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            manager.match(kit.keys_of(kit.prompt(7)))
            answer = "nothing"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


if __name__ == "__main__":
    main()
