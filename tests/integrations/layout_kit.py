"""A real engine that tells, for each prompt with documents, what of them was reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pcr_core import Engine, EngineConfig
from pcr_core.request import Request

GRID = 16
QUESTIONS = ("Which of the two rivers is longer?", "What is the name of the bridge?")


def texts(row: str) -> list[str]:
    """Documents that no other row has."""
    return [
        f'{row}: the northern river runs\nthrough four towns, says "Ann".',
        f"{row}: the southern river has one bridge; it's of stone and old.",
    ]


class Watched:
    """Notes the requests of an engine that name documents."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        read = engine._intake.read

        def noted(*args: Any) -> Request:
            made = read(*args)
            self.requests.append(made)
            return made

        engine._intake.read = noted  # type: ignore[method-assign]

    def reused(self) -> list[bool | None]:
        """For each prompt with documents: all of them, none, or ``None`` for some."""
        found = []
        for request in self.requests:
            if request.spans and request.completion.done:
                cached = request.completion.result().usage.cached_tokens
                first = min(span.first_token for span in request.spans)
                stop = max(span.stop_token for span in request.spans)
                # An exact engine goes on from a multiple of 16 tokens.
                all_of_them, none = cached > stop - GRID, cached < first + GRID
                found.append(all_of_them if all_of_them or none else None)
        self.requests.clear()
        return found

    def ids(self) -> set[str]:
        """Documents named since the last call of ``reused``."""
        return {span.document for one in self.requests for span in one.spans}


def share_probes(folder: Path, probes: Path) -> None:
    """Let engines in a folder find what others have measured of the same model."""
    (folder / "probes").symlink_to(probes, target_is_directory=True)


@contextmanager
def watched_engine(folder: Path, model: Any, tokenizer: Any) -> Iterator[Watched]:
    """An engine with chunks of 16 tokens, one token a byte."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig(
        cache_dir=folder, dram_bytes="32MiB", ssd_bytes=0, chunk_tokens=GRID
    )
    with Engine(config, model=model, tokenizer=tokenizer) as engine:
        yield Watched(engine)
    torch.set_num_threads(before)
