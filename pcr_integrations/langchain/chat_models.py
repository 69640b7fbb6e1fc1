"""``ChatPCR``: a LangChain chat model on a PCR engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import (
    BaseChatModel,
    LangSmithParams,
    LanguageModelInput,
    ModelProfile,
)
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from pcr_core import PromptTooLongError, RequestError
from pcr_integrations._bridge import Call
from pcr_integrations._engines import open_engine_for
from pcr_integrations._tools import tell_of_tools, tool_use
from pcr_integrations.langchain._batches import take_place
from pcr_integrations.langchain._batching import Batching
from pcr_integrations.langchain._common import FRAMEWORK_KEYWORDS, LangChainFields
from pcr_integrations.langchain._messages import to_turns
from pcr_integrations.langchain._profiles import profile_of
from pcr_integrations.langchain._replies import chat_result, last_chunk, text_chunk
from pcr_integrations.langchain._structured import (
    json_parser,
    parsed,
    response_format,
    tool_parser,
)
from pcr_integrations.langchain._tool_specs import Tool, tool_specs

if TYPE_CHECKING:
    from pcr_core import Engine, Explanation


class ChatPCR(Batching[AIMessage], LangChainFields, BaseChatModel):
    """Chat model that reuses the KV cache of prompts seen before.

    Setup:
        ``pip install "pcr-rag[langchain]"``. The model runs in this process.

    Key init args:
        engine: An ``Engine`` to use. Without it, any ``EngineConfig`` field by its name
            (``model``, ``cache_dir``, ``dram_bytes``, ...); equal configurations in one
            process share one engine, built on first use.
        temperature, max_tokens, top_p, seed, stop, ...: Any ``SamplingParams`` field,
            also accepted by ``bind`` and by every call, where it replaces this one.
        timeout: Seconds to wait for the engine; then the request is cancelled.

    Instantiate and invoke:
        >>> llm = ChatPCR(max_tokens=32)                            # doctest: +SKIP
        >>> answer = llm.invoke("What is a KV cache?")              # doctest: +SKIP
        >>> answer.usage_metadata["input_token_details"]            # doctest: +SKIP
        {'cache_read': 0, 'cache_creation': 37}

    Stream:
        >>> for chunk in llm.stream("What is a KV cache?"):         # doctest: +SKIP
        ...     print(chunk.text, end="")

    Batch:
        >>> questions = ["What is a KV cache?", "And a prefix?"]    # doctest: +SKIP
        >>> answers = llm.batch(questions)                          # doctest: +SKIP

    All prompts of a batch are in the engine's queue, in order, before one is waited
    for; each is an ``invoke``, with its own callbacks. ``max_concurrency`` limits how
    many are under way. The first failure cancels the rest, unless
    ``return_exceptions``. ``ainvoke``, ``astream`` and ``abatch`` leave the loop free.

    Tools:
        >>> def add(a: int, b: int) -> int:                         # doctest: +SKIP
        ...     "Add two integers."
        ...     return a + b
        >>> llm.bind_tools([add]).invoke("1 + 2?").tool_calls       # doctest: +SKIP

    Structured output:
        >>> schema = {"title": "City", "type": "object",            # doctest: +SKIP
        ...           "properties": {"name": {"type": "string"}}}
        >>> city = llm.with_structured_output(schema)               # doctest: +SKIP
        >>> city.invoke("Where is the Louvre?")                     # doctest: +SKIP
        {'name': 'Paris'}

    ``response_metadata["pcr"]`` has reuse by tier and by document, and the time to
    first token; ``explain`` says what would be reused of a prompt, and why. Streams
    end with one chunk that carries usage, metadata and tool calls.

    Tools go into the model's chat template; for a template without tools they are
    described in a system turn. ``tool_choice="required"``, or a tool's name, forces a
    call: decoding is held to the tools' schemas if the extra ``structured`` is
    installed; without it the model is only asked.

    May be used from any number of threads and event loops at once.

    ``profile`` is filled as soon as the engine is open.

    Raises:
        ConfigError: For an unknown setting or a bad one of the engine, at construction.
        RequestError: For a bad sampling field, an unknown call option, or content that
            is not text.
        PromptTooLongError: Before any compute; it is a ``ContextOverflowError``, too.
    """

    @property
    def _llm_type(self) -> str:
        return "pcr-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that can change an answer: LangChain's caches key on it."""
        return self._identity()

    def _get_ls_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> LangSmithParams:
        return self._trace_params("chat", stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        """Known where the engine is open; else filled in when it is built."""
        engine = open_engine_for(self.engine, self._engine_settings())
        return None if engine is None else profile_of(engine)

    def _open_engine(self, model: str | None = None) -> Engine:
        engine = super()._open_engine(model)
        if self.profile is None and model in (None, self._model_label()):
            self.profile = profile_of(engine)
        return engine

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        running = take_place().start(self._call(messages, stop, kwargs))
        result = running.result()
        return chat_result(running.engine, result, running.reader().whole(result.text))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        running = await take_place().astart(self._call(messages, stop, kwargs))
        result = await running.aresult()
        return chat_result(running.engine, result, running.reader().whole(result.text))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        running = take_place().start(self._call(messages, stop, kwargs))
        reader = running.reader()
        with closing(running.texts(reader)) as texts:
            for text in texts:
                chunk = text_chunk(text)
                if run_manager is not None:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        end = reader.finish()
        chunk = last_chunk(running.engine, running.completion.result(), end)
        if run_manager is not None:
            run_manager.on_llm_new_token(end.text, chunk=chunk)
        yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        running = await take_place().astart(self._call(messages, stop, kwargs))
        reader = running.reader()
        async with aclosing(running.atexts(reader)) as texts:
            async for text in texts:
                chunk = text_chunk(text)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        end = reader.finish()
        chunk = last_chunk(running.engine, running.completion.result(), end)
        if run_manager is not None:
            await run_manager.on_llm_new_token(end.text, chunk=chunk)
        yield chunk

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools for every call.

        Args:
            tools: Functions, ``BaseTool`` objects, Pydantic classes or schemas.
            tool_choice: ``"auto"``, ``"none"``, ``"any"`` or ``"required"``, or a name.
            strict: Passed into the schemas.
            kwargs: Further call options to bind, e.g. ``parallel_tool_calls=False``.

        Raises:
            RequestError: For a tool that cannot be described to a model.
        """
        formatted = tool_specs(tools, strict=strict)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable that answers with an object of ``schema``.

        Args:
            schema: Pydantic class, ``TypedDict`` or JSON schema.
            include_raw: Return ``{"raw", "parsed", "parsing_error"}``.
            method: ``"function_calling"``, ``"json_schema"`` or ``"json_mode"``. With
                the extra ``structured`` decoding is held to the schema (or, in JSON
                mode, to a JSON object), so only an answer that ``max_tokens`` cuts
                short cannot be parsed. Without it the model is only asked.
            strict: Passed into the tool's schema; only for ``"function_calling"``.
            kwargs: Further call options to bind.

        Raises:
            RequestError: For an unknown method, or what is no schema.
        """
        if method not in ("function_calling", "json_schema", "json_mode"):
            raise RequestError(
                f"method={method!r} is unknown; use 'function_calling', 'json_schema' "
                "or 'json_mode'"
            )
        traced = {"kwargs": {"method": method}, "schema": schema}
        kwargs["ls_structured_output_format"] = traced
        if method == "function_calling":
            calling = self.bind_tools(
                [schema],
                tool_choice="any",
                strict=strict,
                **{"parallel_tool_calls": False, **kwargs},
            )
            return parsed(calling, tool_parser(schema), include_raw=include_raw)
        writing = self.bind(response_format=response_format(schema, method), **kwargs)
        return parsed(writing, json_parser(schema), include_raw=include_raw)

    def explain(
        self, input: LanguageModelInput, *, tools: Sequence[Tool] = (), **kwargs: Any
    ) -> Explanation:
        """Say what of a prompt would be reused from which tier, and why no more.

        The prompt is the one that ``invoke`` would submit; the documents that retriever
        wrappers have handed over are found in it and named. Runs nothing, changes
        nothing, and fires no callbacks.

        Args:
            input: Text, messages or a prompt value.
            tools: As for ``bind_tools``: a bound model's are not known here.
            kwargs: Further call options.

        Raises:
            RequestError: As ``invoke``.
        """
        messages = self._convert_input(input).to_messages()
        specs = {"tools": tool_specs(tools)} if tools else {}
        return self._call(messages, None, {**specs, **kwargs}).explain()

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Return the length of the prompt these messages make, template included."""
        if not messages:
            return 0
        use = tool_use(tool_specs(tools or ()), choice=None, parallel=True)
        engine = self._open_engine()
        turns, told = tell_of_tools(engine, to_turns(messages), use)
        try:
            return len(engine.encode(turns, tools=told))
        except PromptTooLongError as error:
            return error.prompt_tokens  # what callers count for: to cut it down

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
    ) -> Call:
        asked = kwargs if stop is None else {**kwargs, "stop": stop}
        options = self._options(asked, FRAMEWORK_KEYWORDS)
        turns = to_turns(messages)
        return Call(partial(self._open_engine, options.model), lambda _: turns, options)
