"""``PCRLLM``: a LlamaIndex LLM on a PCR engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.utils import set_global_tokenizer

from pcr_core import RequestError, SamplingParams
from pcr_integrations._bridge import Call, Running
from pcr_integrations._fields import PcrFields
from pcr_integrations._tool_calls import ParsedReply
from pcr_integrations._tools import ChatTurn
from pcr_integrations.llama_index._events import with_async_events, with_events
from pcr_integrations.llama_index._messages import to_turns
from pcr_integrations.llama_index._responses import (
    chat_piece,
    chat_response,
    completion_response,
)
from pcr_integrations.llama_index._structured import StructuredPrediction
from pcr_integrations.llama_index._turnstile import astart, start

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

    from pcr_core import Engine, Explanation


class PCRLLM(PcrFields, StructuredPrediction, FunctionCallingLLM):
    """LLM that reuses the KV cache of prompts seen before.

    Args:
        engine: An ``Engine`` to use. Without it, any ``EngineConfig`` field by its name
            (``model`` or ``model_name``, ``cache_dir``, ``dram_bytes``, ...); equal
            configurations in one process share one engine, built on first use.
        max_tokens: Also ``max_new_tokens``. This and any other ``SamplingParams`` field
            can also be given to a call, where it replaces this one.
        timeout: Seconds to wait for the engine; then the request is cancelled.
        context_window: Overrides the model's, in tokens, for LlamaIndex' own budgeting.
        is_chat_model: Overrides "the tokenizer has a chat template".
        is_function_calling_model: Overrides "that template renders tools".
        system_prompt: As in every LlamaIndex LLM: put in front of the prompts of query
            engines, not of direct calls of ``chat``.

    ``response.raw`` has ``usage`` (tokens, by tier where they were cached), ``timing``
    (seconds), ``finish_reason``, ``model`` and ``pcr`` (reuse by document); a stream's
    last response has them.

    Example:
        >>> llm = PCRLLM(max_tokens=32)                              # doctest: +SKIP
        >>> llm.complete("What is a KV cache?").raw["usage"]         # doctest: +SKIP

    May be used from any number of threads and event loops at once. One start and one
    end event per call, on every path.

    Raises:
        ConfigError: For an unknown setting or a bad one of the engine, at construction.
        RequestError: For a bad sampling field, an unknown call option, or content that
            is not text; ``PromptTooLongError`` is one. No ``ValueError``: LlamaIndex
            would make "Empty Response" of it.
    """

    context_window: int | None = None
    is_chat_model: bool | None = None
    is_function_calling_model: bool | None = None

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex stores in serialised components."""
        return "PCRLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex budgets prompts by. Builds the engine on first access.

        ``num_output`` is ``max_tokens``, at most half the window, so that prompts keep
        room.
        """
        engine = self._open_engine()
        window = self.context_window or engine.context_window
        return LLMMetadata(
            context_window=window,
            num_output=min(self._max_tokens(), max(1, window // 2)),
            is_chat_model=self._chats(engine),
            is_function_calling_model=(
                engine.supports_tools
                if self.is_function_calling_model is None
                else self.is_function_calling_model
            ),
            model_name=engine.model_name,
            system_role=MessageRole.SYSTEM,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe this LLM to event handlers, without loading it."""
        return {
            "class_name": self.class_name(),
            "model_name": self._model_label(),
            "context_window": self.context_window,
            "num_output": self._max_tokens(),
            "temperature": self.temperature,
        }

    def install_tokenizer(self) -> None:
        """Make LlamaIndex count tokens with this model's tokenizer, in this process.

        Without it LlamaIndex splits and packs text by the tokens of another model.
        """
        tokenizer = self._open_engine().tokenizer
        set_global_tokenizer(partial(tokenizer.encode, add_special_tokens=False))

    # --- chat ---

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        running = start(self._chat_call(messages, kwargs))
        result = running.result()
        reply = running.reader().whole(result.text)
        return chat_response(running.engine, result, reply)

    @llm_chat_callback()
    async def achat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponse:
        """As ``chat``, without blocking the loop."""
        running = await astart(self._chat_call(messages, kwargs))
        result = await running.aresult()
        reply = running.reader().whole(result.text)
        return chat_response(running.engine, result, reply)

    def stream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseGen:
        """Answer a chat piece by piece; closing the generator cancels the request."""
        source = self._chat_stream(self._chat_call(messages, kwargs))
        return with_events(llm_chat_callback(), source, (self, messages), kwargs)

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As ``stream_chat``, without blocking the loop."""
        source = self._chat_astream(self._chat_call(messages, kwargs))
        return await with_async_events(
            llm_chat_callback(), source, (self, messages), kwargs
        )

    # --- completion ---

    @llm_completion_callback()
    def complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a prompt.

        Args:
            prompt: Text. For a chat model it becomes one user turn, unless
            formatted: says that it is already what the model should see.
            kwargs: Call options.
        """
        running = start(self._text_call(prompt, formatted, kwargs))
        return completion_response(running.engine, running.result())

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As ``complete``, without blocking the loop."""
        running = await astart(self._text_call(prompt, formatted, kwargs))
        return completion_response(running.engine, await running.aresult())

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Complete a prompt piece by piece; closing the generator cancels it."""
        source = self._text_stream(self._text_call(prompt, formatted, kwargs))
        return with_events(
            llm_completion_callback(), source, (self, prompt, formatted), kwargs
        )

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As ``stream_complete``, without blocking the loop."""
        source = self._text_astream(self._text_call(prompt, formatted, kwargs))
        return await with_async_events(
            llm_completion_callback(), source, (self, prompt, formatted), kwargs
        )

    # --- what would be reused ---

    def explain(
        self,
        prompt: str | Sequence[ChatMessage],
        formatted: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """Say what of a prompt would be reused from which tier, and why no more.

        The prompt is the one that ``complete`` or, for messages, ``chat`` would submit;
        the documents that retriever and postprocessor wrappers have handed over are
        found in it and named. Runs nothing, changes nothing, and fires no events.

        Args:
            prompt: Text, or messages.
            formatted: See ``complete``; messages have no use for it.
            kwargs: Call options.

        Raises:
            RequestError: As the call.
        """
        if isinstance(prompt, str):
            return self._text_call(prompt, formatted, kwargs).explain()
        return self._chat_call(prompt, kwargs).explain()

    # --- tools ---

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        specs = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        if kwargs.get("tool_choice") is None:
            kwargs["tool_choice"] = "required" if tool_required and specs else "auto"
        return {
            "messages": messages,
            "tools": specs,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of a response.

        Raises:
            ValueError: If there is none and ``error_on_no_tool_call``.
        """
        selected = [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=block.tool_kwargs,
            )
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock) and isinstance(block.tool_kwargs, dict)
        ]
        if not selected and error_on_no_tool_call:
            raise ValueError(
                f"the model called no tool; it said: {response.message.content!r}"
            )
        return selected

    # --- one undecorated implementation under each endpoint ---

    def _constrains(self) -> bool:
        return bool(self._open_engine().supports_constraints)

    def _max_tokens(self) -> int:
        return SamplingParams(**self._sampling_defaults()).max_tokens

    def _chat_call(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> Call:
        options = self._options(kwargs)
        custom = self.messages_to_prompt
        prompt: str | list[ChatTurn] = (
            to_turns(messages)
            if custom is None or custom is generic_messages_to_prompt
            else custom(messages)
        )
        return Call(
            partial(self._open_engine, options.model), lambda _: prompt, options
        )

    def _text_call(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Call:
        options = self._options(kwargs)
        if options.tools is not None:
            raise RequestError("tools need chat messages: use chat, or chat_with_tools")
        custom = self.completion_to_prompt
        if not formatted and custom not in (None, default_completion_to_prompt):
            prompt, formatted = custom(prompt), True

        def render(engine: Engine) -> str | list[ChatTurn]:
            if formatted or not self._chats(engine):
                return prompt
            return [{"role": "user", "content": prompt}]

        return Call(partial(self._open_engine, options.model), render, options)

    def _chats(self, engine: Engine) -> bool:
        given = self.is_chat_model
        return engine.has_chat_template if given is None else given

    def _chat_stream(self, call: Call) -> Generator[ChatResponse, None, None]:
        running = start(call)
        reader, said = running.reader(), ""
        with closing(running.texts(reader)) as texts:
            for text in texts:
                said += text
                yield chat_piece(said, text)
        yield self._chat_end(running, reader.finish(), said)

    async def _chat_astream(self, call: Call) -> AsyncGenerator[ChatResponse, None]:
        running = await astart(call)
        reader, said = running.reader(), ""
        async with aclosing(running.atexts(reader)) as texts:
            async for text in texts:
                said += text
                yield chat_piece(said, text)
        yield self._chat_end(running, reader.finish(), said)

    def _chat_end(self, running: Running, end: ParsedReply, said: str) -> ChatResponse:
        result = running.completion.result()
        return chat_response(running.engine, result, end, said=said, delta=end.text)

    def _text_stream(self, call: Call) -> Generator[CompletionResponse, None, None]:
        running, said = start(call), ""
        with closing(running.pieces()) as pieces:
            for piece in pieces:
                said += piece
                yield CompletionResponse(text=said, delta=piece)
        result = running.completion.result()
        yield completion_response(running.engine, result, delta="")

    async def _text_astream(
        self, call: Call
    ) -> AsyncGenerator[CompletionResponse, None]:
        running, said = await astart(call), ""
        async with aclosing(running.apieces()) as pieces:
            async for piece in pieces:
                said += piece
                yield CompletionResponse(text=said, delta=piece)
        result = running.completion.result()
        yield completion_response(running.engine, result, delta="")
