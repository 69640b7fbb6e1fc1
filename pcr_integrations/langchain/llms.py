"""``PCRLLM``: a LangChain text-completion model on a PCR engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import (
    BaseLLM,
    LangSmithParams,
    LanguageModelInput,
)
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue

from pcr_core import SamplingParams
from pcr_integrations._bridge import Call, Running
from pcr_integrations._options import ALIASES
from pcr_integrations.langchain._batches import take_place
from pcr_integrations.langchain._batching import Batching
from pcr_integrations.langchain._common import FRAMEWORK_KEYWORDS, LangChainFields
from pcr_integrations.langchain._messages import text_only
from pcr_integrations.langchain._replies import response_metadata

if TYPE_CHECKING:
    from pcr_core import Engine, Explanation, Result


_CHANGE_ANSWERS = frozenset({"model", *SamplingParams.model_fields})


class PCRLLM(Batching[str], LangChainFields, BaseLLM):
    """Text model: the prompt goes to the model as it is, without a chat template.

    For instruction-tuned models use ``ChatPCR``. Takes the same arguments. ``batch``,
    ``generate`` and their kin submit every prompt before one is waited for, so that
    the queue knows what is coming.

    Setup:
        ``pip install "pcr-rag[langchain]"``

    Invoke:
        >>> llm = PCRLLM(max_tokens=16, stop=["."])           # doctest: +SKIP
        >>> llm.batch(["The capital of France is", "1 + 1 ="])  # doctest: +SKIP

    ``generation_info`` has the finish reason and, under ``"pcr"``, reuse and times.

    May be used from any number of threads and event loops at once.

    Raises:
        ConfigError: For an unknown setting or a bad one of the engine, at construction.
        RequestError: For a bad sampling field, an unknown call option, or messages that
            are not text.
    """

    @property
    def _llm_type(self) -> str:
        return "pcr"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that can change an answer: LangChain's caches key on it."""
        return self._identity()

    def _get_ls_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> LangSmithParams:
        return self._trace_params("llm", stop, kwargs)

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        return text_only(super()._convert_input(model_input))

    def generate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As ``generate``; messages become text, and must be text."""
        checked = [text_only(prompt) for prompt in prompts]
        return super().generate_prompt(checked, stop, callbacks, **kwargs)

    async def agenerate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As ``generate_prompt``, without blocking the loop."""
        checked = [text_only(prompt) for prompt in prompts]
        return await super().agenerate_prompt(checked, stop, callbacks, **kwargs)

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Complete several prompts; all are submitted before one is waited for."""
        model, rest = self._with_options(kwargs)
        return super(PCRLLM, model).generate(prompts, stop, callbacks, **rest)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As ``generate``, without blocking the loop."""
        model, rest = self._with_options(kwargs)
        return await super(PCRLLM, model).agenerate(prompts, stop, callbacks, **rest)

    def _with_options(self, kwargs: dict[str, Any]) -> tuple[PCRLLM, dict[str, Any]]:
        """Make call options settings of a copy, and return what is none of them.

        LangChain caches the answers of text models by the model's settings and the
        stop list only: an answer for another ``seed=`` would be taken for this one.
        """
        names = {name: ALIASES.get(name, name) for name in kwargs}
        changed = {
            names[name]: value
            for name, value in kwargs.items()
            if names[name] in _CHANGE_ANSWERS and value is not None
        }
        twice = len(set(names.values())) < len(names)
        if not changed or twice:  # ``twice`` is checked, and refused, further down
            return self, kwargs
        rest = {k: v for k, v in kwargs.items() if names[k] not in changed}
        return self.model_copy(update=changed), rest

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        place, runs = take_place(), list[Running]()
        with ExitStack() as stack:
            for call in self._calls(prompts, stop, kwargs):
                runs.append(place.start(call))
                stack.callback(runs[-1].release)
            return _llm_result(runs, [running.result() for running in runs])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        place, runs = take_place(), list[Running]()
        with ExitStack() as stack:
            for call in self._calls(prompts, stop, kwargs):
                runs.append(await place.astart(call))
                stack.callback(runs[-1].release)
            return _llm_result(runs, [await running.aresult() for running in runs])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        (call,) = self._calls([prompt], stop, kwargs)
        running = take_place().start(call)
        with closing(running.pieces()) as pieces:
            for piece in pieces:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last_chunk(running)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        (call,) = self._calls([prompt], stop, kwargs)
        running = await take_place().astart(call)
        async with aclosing(running.apieces()) as pieces:
            async for piece in pieces:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last_chunk(running)

    def explain(self, input: LanguageModelInput, **kwargs: Any) -> Explanation:
        """Say what of a prompt would be reused from which tier, and why no more.

        Documents that retriever wrappers have handed over are named. Runs nothing,
        changes nothing, and fires no callbacks.

        Args:
            input: Text, messages or a prompt value.
            kwargs: Call options.

        Raises:
            RequestError: As ``invoke``.
        """
        (call,) = self._calls([self._convert_input(input).to_string()], None, kwargs)
        return call.explain()

    def _calls(
        self, prompts: list[str], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> list[Call]:
        asked = kwargs if stop is None else {**kwargs, "stop": stop}
        options = self._options(asked, FRAMEWORK_KEYWORDS)
        open_engine = partial(self._open_engine, options.model)
        return [Call(open_engine, partial(_as_it_is, p), options) for p in prompts]


def _last_chunk(running: Running) -> GenerationChunk:
    """Return the end of a stream; metadata comes once, because chunks are added up."""
    info = response_metadata(running.engine, running.completion.result())
    return GenerationChunk(text="", generation_info=info)


def _as_it_is(prompt: str, _: Engine) -> str:
    return prompt


def _llm_result(runs: list[Running], results: list[Result]) -> LLMResult:
    generations = [
        [
            Generation(
                text=result.text,
                generation_info=response_metadata(running.engine, result),
            )
        ]
        for running, result in zip(runs, results, strict=True)
    ]
    prompt = sum(result.usage.prompt_tokens for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": sum(result.usage.cached_tokens for result in results),
    }
    name = runs[0].engine.model_name if runs else None
    return LLMResult(
        generations=generations, llm_output={"token_usage": usage, "model_name": name}
    )
