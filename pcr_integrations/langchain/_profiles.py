"""What a model can do, in the words of LangChain's model profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_core.language_models import ModelProfile

if TYPE_CHECKING:
    from pcr_core import Engine


def profile_of(engine: Engine) -> ModelProfile:
    """Return the profile of the model that an engine serves.

    ``tool_calling`` says whether its chat template renders tools; to other models they
    are described in words.
    """
    return ModelProfile(
        name=engine.model_name,
        max_input_tokens=engine.context_window,
        max_output_tokens=engine.context_window,
        text_inputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        pdf_inputs=False,
        image_tool_message=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        tool_calling=engine.supports_tools,
        temperature=True,
    )
