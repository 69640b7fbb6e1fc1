"""An engine in another process, driven by lines of JSON on standard input.

Each line ``[METHOD, {ARGUMENTS}]`` is answered by one line; the methods are those of
``Child``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from pcr_core import Document, Engine, EngineConfig, SamplingParams


class Child:
    """One engine at a time."""

    engine: Engine

    def open(self, **settings: Any) -> str:
        self.engine = Engine(EngineConfig(**settings))
        return self.engine.stats().namespace

    def ask(self, prompt: str, documents: list[list[str]]) -> Any:
        result = self.engine.submit(
            prompt,
            SamplingParams(max_tokens=4, logprobs=True),
            documents=[Document(id=id, text=text) for id, text in documents],
        ).result()
        return [result.token_ids, result.logprobs, result.usage.cached_tokens]

    def forget(self, id: str) -> Any:
        return asdict(self.engine.forget(id))

    def flush(self) -> bool:
        return self.engine.flush()

    def close(self) -> None:
        self.engine.close()


def main() -> None:
    child = Child()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(child, method)(**arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
