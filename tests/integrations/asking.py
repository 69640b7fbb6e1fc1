"""What several test modules ask of a model, and the ways to ask many things."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage

QUESTION = "What is it that a question must be, if it is to fill a chunk or two of KV?"


def ask_twice(model: BaseChatModel, *, stream: bool) -> AIMessage:
    """Return the second answer to one question: the prompt is cached by then."""
    model.invoke(QUESTION)
    if stream:
        *_, last = model.stream(QUESTION)
        return last
    return model.invoke(QUESTION)


def batch(llm: Any, inputs: Any, config: Any = None, **options: Any) -> list[Any]:
    return list(llm.batch(inputs, config, **options))


def abatch(llm: Any, inputs: Any, config: Any = None, **options: Any) -> list[Any]:
    return list(asyncio.run(llm.abatch(inputs, config, **options)))


def as_completed(llm: Any, inputs: Any, config: Any = None, **opts: Any) -> list[Any]:
    found = dict(llm.batch_as_completed(inputs, config, **opts))
    return [found[index] for index in range(len(inputs))]


def aas_completed(llm: Any, inputs: Any, config: Any = None, **opts: Any) -> list[Any]:
    async def main() -> dict[int, Any]:
        running = llm.abatch_as_completed(inputs, config, **opts)
        return {index: answer async for index, answer in running}

    found = asyncio.run(main())
    return [found[index] for index in range(len(inputs))]


WAYS = [batch, abatch, as_completed, aas_completed]
PROMPTS = [f"prompt-{index}" for index in range(20)]  # more than a pool has threads


def echo(prompt: str) -> str:
    return "answer to " + next(word for word in prompt.split() if "prompt-" in word)


def texts(answers: Any) -> list[str]:
    return [getattr(answer, "content", answer) for answer in answers]


def asked(engine: Any) -> list[str]:
    """What was submitted, in the order of the queue."""
    return [
        prompt if isinstance(prompt, str) else prompt[-1]["content"]
        for prompt, _, _ in engine.submitted
    ]
