"""LangChain's own conformance tests, against settings only: nothing is loaded."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from pcr_integrations.langchain import ChatPCR


class TestChatPCRUnit(ChatModelUnitTests):
    """Skipped by design: env (there is no key to read), serdes (a live engine)."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatPCR

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny"}

    @property
    def supports_json_mode(self) -> bool:
        return True
