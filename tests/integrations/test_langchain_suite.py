"""LangChain's integration suite, with an engine that calls tools as it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from pcr_core import EngineConfig
from pcr_integrations import _engines
from pcr_integrations.langchain import ChatPCR
from tests.integrations.asking import ask_twice


def obedient(turns: Any, tools: Any) -> str:
    """Answer as a model would that always calls the last tool it is told of, once."""
    if tools and turns[-1]["role"] != "tool":
        function = tools[-1]["function"]
        arguments = example(function.get("parameters", {}), turns)
        call = {"name": function["name"], "arguments": arguments}
        return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
    if turns[0]["role"] == "system" and "JSON object" in turns[0]["content"]:
        return json.dumps({"setup": "Why?", "punchline": "Because."})
    return "Hello, this is an answer of some words."


def example(schema: Mapping[str, Any], turns: Any) -> Any:
    """Make a value that a JSON schema accepts."""
    if "properties" in schema:
        return {name: example(one, turns) for name, one in schema["properties"].items()}
    if "anyOf" in schema:
        return example(schema["anyOf"][0], turns)
    if schema.get("enum"):
        return schema["enum"][0]
    question = turns[-1]["content"]
    quoted = question.split("'")[1] if question.count("'") >= 2 else "text"
    kinds = {"integer": 3, "number": 3, "string": quoted, "array": [], "boolean": True}
    return kinds.get(schema.get("type", ""), {})


class TestChatPCRIntegration(ChatModelIntegrationTests):
    """All of it, tools and structured output included.

    Skipped, because the models are text models: images, PDF and audio, in messages and
    in what tools return (``test_image_inputs``, ``test_image_tool_message``,
    ``test_pdf_inputs``, ``test_pdf_tool_message``, ``test_audio_inputs``). Skipped,
    because nothing goes over a network that could be recorded: ``test_stream_time``.
    """

    @pytest.fixture(autouse=True)
    def _engines(self, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def build(config: EngineConfig) -> Any:
            return make_engine(config, answer=obedient)

        monkeypatch.setattr(_engines, "_ENGINES", _engines.EngineRegistry(build))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPCR

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "timeout": None}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another"

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return ask_twice(ChatPCR(**self.chat_model_params), stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return ask_twice(ChatPCR(**self.chat_model_params), stream=stream)
