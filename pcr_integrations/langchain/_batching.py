"""``batch`` and its kin, as calls of ``invoke`` that begin in order.

What a model inherits from LangChain runs as many calls at a time as its thread pool has
threads, so that an engine with a queue sees little of what is coming.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Literal, TypeVar, overload

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from pcr_integrations.langchain._batches import arun, run

Output = TypeVar("Output")
Configs = RunnableConfig | Sequence[RunnableConfig] | None


class Batching(Runnable[LanguageModelInput, Output]):
    """Batches whose prompts are all in the engine's queue before one is waited for.

    Each input is an ``invoke`` of its own, traced and cached as such. The first one's
    ``max_concurrency`` limits how many are under way. Unless ``return_exceptions`` is
    set, the first that fails cancels the rest; so does leaving a loop over
    ``batch_as_completed`` early.
    """

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Return the answers in the order of the inputs.

        Args:
            inputs: Prompts, or lists of messages.
            config: One for all, or one for each.
            return_exceptions: Return an exception in the place of its answer.
            kwargs: Call options.

        Raises:
            PcrError: The first failure, in time.
        """
        with closing(self._ended(inputs, config, return_exceptions, kwargs)) as ended:
            answers = dict(ended)
        return [answers[index] for index in range(len(inputs))]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """As ``batch``, without blocking the loop."""
        running = self._aended(inputs, config, return_exceptions, kwargs)
        async with aclosing(running) as ended:
            answers = {index: answer async for index, answer in ended}
        return [answers[index] for index in range(len(inputs))]

    @overload
    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: Literal[False] = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Output]]: ...

    @overload
    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: Literal[True],
        **kwargs: Any,
    ) -> Iterator[tuple[int, Output | Exception]]: ...

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Output | Exception]]:
        """Yield index and answer of each input when it is there; see ``batch``."""
        with closing(self._ended(inputs, config, return_exceptions, kwargs)) as ended:
            yield from ended

    @overload
    def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: Literal[False] = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Output]]: ...

    @overload
    def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: Literal[True],
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Output | Exception]]: ...

    async def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Output | Exception]]:
        """As ``batch_as_completed``, without blocking the loop."""
        running = self._aended(inputs, config, return_exceptions, kwargs)
        async with aclosing(running) as ended:
            async for one in ended:
                yield one

    def _ended(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs,
        return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> Generator[tuple[int, Any], None, None]:
        configs = get_config_list(config, len(inputs))
        calls: list[Callable[[], Any]] = [
            partial(self.invoke, one, configs[index], **kwargs)
            for index, one in enumerate(inputs)
        ]
        if return_exceptions:
            calls = [partial(_or_exception, call) for call in calls]
        return run(calls, _at_most(configs))

    def _aended(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs,
        return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[tuple[int, Any], None]:
        configs = get_config_list(config, len(inputs))
        calls: list[Callable[[], Any]] = [
            partial(self.ainvoke, one, configs[index], **kwargs)
            for index, one in enumerate(inputs)
        ]
        if return_exceptions:
            calls = [partial(_aor_exception, call) for call in calls]
        return arun(calls, _at_most(configs))


def _at_most(configs: Sequence[RunnableConfig]) -> int | None:
    return configs[0].get("max_concurrency") if configs else None


def _or_exception(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


async def _aor_exception(call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except Exception as error:
        return error
