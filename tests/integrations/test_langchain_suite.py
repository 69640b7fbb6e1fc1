"""LangChain's integration suite, with an engine that calls tools as it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from pcr_integrations.langchain import ChatPCR


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
    """Skipped by design: images, audio, PDF and other content that is not text.

    ``model`` per call needs settings instead of an engine: see test_langchain_chat.
    """

    @pytest.fixture(autouse=True)
    def _engine(self, make_engine: Any) -> None:
        self.engine = make_engine(answer=obedient)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPCR

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPCR(engine=self.engine)
        model.invoke("a long enough question")
        if stream:
            *_, last = model.stream("a long enough question")
            return last
        return model.invoke("a long enough question")

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self.invoke_with_cache_read_input(stream=stream)
