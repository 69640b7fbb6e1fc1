"""Prompts that put the documents in front of the question, so that they are reused.

Chat models need none of them: LlamaIndex' own chat prompts have that order.
"""

from __future__ import annotations

from llama_index.core import PromptTemplate
from llama_index.core.prompts.prompt_type import PromptType

REFINE = PromptTemplate(
    "Refine an existing answer with more context. If the context isn't useful, return "
    "the existing answer.\n"
    "------------\n"
    "{context_msg}\n"
    "------------\n"
    "The original query is as follows: {query_str}\n"
    "We have provided an existing answer: {existing_answer}\n"
    "Refined Answer: ",
    prompt_type=PromptType.REFINE,
)
"""For ``response_synthesizer:refine_template`` of a completion model."""

__all__ = ["REFINE"]
