"""Tools on their way to the model: which ones, and how a prompt tells it of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcr_core import RequestError

if TYPE_CHECKING:
    from pcr_core import Engine

ChatTurn = dict[str, Any]

_INSTRUCTION = """\
You may call one or more of these functions to answer. Their signatures:
<tools>
{signatures}
</tools>
{duty} answer with a JSON object inside <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one call.

    Attributes:
        tools: OpenAI function tools: ``{"type": "function", "function": {...}}``.
        required: The caller wants a call, not text.
        parallel: More than one call per answer is welcome; if not, the first counts.
    """

    tools: tuple[Mapping[str, Any], ...]
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def tool_use(
    tools: Iterable[Mapping[str, Any]] | None, *, choice: object, parallel: bool
) -> ToolUse | None:
    """Read ``tools`` and ``tool_choice`` in the spellings the frameworks use.

    Args:
        tools: OpenAI function tools, or ``None``.
        choice: ``None``, ``"auto"``, ``"none"``, ``"any"``, ``"required"``, a bool, a
            function's name, or ``{"type": "function", "function": {"name": ...}}``.
        parallel: See ``ToolUse``.

    Raises:
        RequestError: For a tool without a name or with parameters that are no schema,
            or a choice that names no tool.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools or (), Iterable):
        raise RequestError(f"tools is a list of tools, not {tools!r:.80}")
    known = tuple(_checked(tool) for tool in tools or ())
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name", choice.get("type"))
    if not known:
        if choice in (None, "auto", "none", False):
            return None
        raise RequestError(f"tool_choice={choice!r} was given without any tools")
    if choice in ("none", False):
        return None
    if choice in (None, "auto"):
        return ToolUse(known, parallel=parallel)
    if choice in ("any", "required", True):
        return ToolUse(known, required=True, parallel=parallel)
    chosen = tuple(tool for tool in known if tool["function"]["name"] == choice)
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in known)
        raise RequestError(f"tool_choice={choice!r} names no tool; there are: {names}")
    return ToolUse(chosen, required=True, parallel=parallel)


def _checked(tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(
            "a tool is {'type': 'function', 'function': {'name': ..., 'parameters': "
            f"...}}}}, not {tool!r}"
        )
    assert isinstance(function, Mapping)
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise RequestError(
            f"the parameters of the tool {name!r} are a JSON schema, a mapping; not "
            f"{function['parameters']!r:.80}"
        )
    return tool


def tell_of_tools(
    engine: Engine, turns: Sequence[ChatTurn], use: ToolUse | None
) -> tuple[list[ChatTurn], list[Mapping[str, Any]] | None]:
    """Return the turns and tools to hand to ``engine.submit``.

    A chat template that renders tools gets them as they are. One that does not
    would drop them without a word, so the tools are described in a system turn, and
    earlier calls and their results become text, in the wording of the Hermes format
    which many small models were trained on.
    """
    if engine.supports_tools:
        return list(turns), list(use.tools) if use is not None else None
    plain = [_as_text(turn) for turn in turns]
    if use is None:
        return plain, None
    return add_instruction(plain, _instruction(use)), None


def ask_for_format(
    turns: Sequence[ChatTurn],
    form: Mapping[str, Any] | None,
    use: ToolUse | None = None,
) -> list[ChatTurn]:
    """Tell the model in the system turn which form the answer must have."""
    if form is None:
        return list(turns)
    text = "Answer with one JSON object and nothing else."
    if use is not None:
        text = f"When you call no function: {text[0].lower()}{text[1:]}"
    if form["type"] == "json_schema":
        schema = json.dumps(form["json_schema"], ensure_ascii=False)
        text = f"{text} It must match this JSON schema:\n{schema}"
    return add_instruction(turns, text)


def add_instruction(turns: Sequence[ChatTurn], text: str) -> list[ChatTurn]:
    """Append ``text`` to the leading system turn, or put one in front."""
    if turns and turns[0]["role"] == "system":
        first = {**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _instruction(use: ToolUse) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.tools)
    duty = "You must call a function:" if use.required else "To call a function,"
    return _INSTRUCTION.format(signatures=signatures, duty=duty)


def _as_text(turn: ChatTurn) -> ChatTurn:
    if turn["role"] == "tool":
        text = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    parts = [turn["content"]] if turn["content"] else []
    for call in calls:
        body = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return {"role": turn["role"], "content": "\n".join(parts)}
