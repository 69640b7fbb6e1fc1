"""Structured prediction that decodes by the schema, where the engine can."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from llama_index.core.llms.llm import LLM
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from pcr_core import SamplingParams
from pcr_integrations._constraints import answer_schema


class StructuredPrediction(LLM):
    """Adds the schema of the output class to the calls of text programs.

    LlamaIndex asks models that call tools for a call, which decoding is held to anyway;
    others it asks for JSON in the prompt and parses what they say. With the extra
    ``structured`` that JSON is of the schema, unless ``max_tokens`` cuts it short.
    """

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return an object of ``output_cls``."""
        options = self._by_schema(output_cls, llm_kwargs)
        return super().structured_predict(output_cls, prompt, options, **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """As ``structured_predict``, without blocking the loop."""
        options = self._by_schema(output_cls, llm_kwargs)
        return await super().astructured_predict(
            output_cls, prompt, options, **prompt_args
        )

    def _by_schema(
        self, output_cls: type[BaseModel], given: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Call options with the schema, unless a tool call or the caller has one."""
        options = dict(given or {})
        mode = self.pydantic_program_mode
        by_text = mode is PydanticProgramMode.LLM or (
            mode is PydanticProgramMode.DEFAULT
            and not self.metadata.is_function_calling_model
        )
        named = {k: v for k, v in options.items() if k in SamplingParams.model_fields}
        taken = SamplingParams(**named).constraint is not None
        if by_text and not taken and self._constrains():
            options["json_schema"] = answer_schema(output_cls.model_json_schema())
        return options

    @abstractmethod
    def _constrains(self) -> bool:
        """Whether the engine can hold decoding to a schema."""
