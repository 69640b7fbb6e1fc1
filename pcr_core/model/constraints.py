"""Constrained decoding: which tokens a schema, a regex or a grammar leaves possible.

llguidance does it: it compiles a constraint over the tokenizer's vocabulary and tells,
after any tokens, which may come next so that the text can still be completed. It is an
optional dependency, imported when the first constraint is compiled.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pcr_core.errors import ModelError, RequestError
from pcr_core.model.processors import Scores
from pcr_core.sampling_params import SamplingParams

_KEPT = 64
_SPACING: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON on one line, spaced as ``json.dumps`` and chat templates do it.

Where any white space is allowed, a small model may write nothing else for ever.
"""


def is_installed() -> bool:
    """Whether llguidance can be imported."""
    return importlib.util.find_spec("llguidance") is not None


class Matcher:
    """Follows one text; a ``Processor``. Engine thread only.

    Args:
        inner: An ``LLMatcher`` of its own.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._inner.is_stopped())

    def __call__(self, scores: Scores) -> None:
        """Set ``scores`` to ``-inf`` where the text cannot go on.

        Raises:
            ModelError: If the constraint has become too complex to follow.
        """
        mask = self._inner.compute_logit_bias()  # one byte a token
        self._check()
        allowed = np.frombuffer(mask, dtype=np.bool_)[: scores.size]
        scores[~allowed] = -np.inf

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen.

        Raises:
            ModelError: As above.
        """
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise ModelError(
                "the constraint cannot be followed any further: "
                f"{self._inner.get_error()}; a simpler schema or pattern may do"
            )


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled constraint, shared by all requests that have the same one.

    Attributes:
        prototype: An ``LLMatcher`` that is never advanced.
    """

    prototype: Any = field(repr=False)

    def start(self) -> Matcher:
        """Return what follows one text, from its beginning."""
        return Matcher(self.prototype.deep_copy())


class Grammars:
    """Compiles constraints for one tokenizer, and keeps the last 64. Any thread.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: Number of logits.
        end_ids: Tokens that end a generation.
        reading: Held while the tokenizer is read: fast ones forbid concurrent use.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        end_ids: Sequence[int],
        reading: threading.Lock | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._end_ids = list(end_ids)
        self._reading = reading or threading.Lock()
        self._lock = threading.Lock()
        self._vocab: Any = None
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    @property
    def usable(self) -> bool:
        """Whether constraints can be compiled here."""
        return is_installed() and hasattr(self._tokenizer, "backend_tokenizer")

    def compile(self, params: SamplingParams) -> Constraint | None:
        """Return the compiled constraint of ``params``, or ``None`` if it has none.

        The first one for a tokenizer takes about a second, a schema milliseconds.

        Raises:
            RequestError: If it cannot be compiled, or the extra is not installed.
        """
        if params.constraint is None:
            return None
        name, value = params.constraint
        key = json.dumps([name, value])
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        made = Constraint(self._matcher(name, value))
        with self._lock:
            self._compiled[key] = made
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return made

    def _matcher(self, name: str, value: Any) -> Any:
        if not is_installed():
            raise RequestError(
                f"{name} needs llguidance, which is not installed; run: "
                'pip install "pcr-rag[structured]"'
            )
        from llguidance import LLMatcher, LLParserLimits

        if name == "choices":
            self._refuse_special(value)
        brief = LLParserLimits(verbose_errors=False)
        grammar = _grammar(name, value)
        matcher = LLMatcher(self._words(), grammar, log_level=0, limits=brief)
        if matcher.is_error():
            raise RequestError(f"{name} cannot be compiled: {matcher.get_error()}")
        return matcher

    def _refuse_special(self, choices: Sequence[str]) -> None:
        """Text that looks like an added token would be read as that token."""
        with self._reading:
            added = getattr(self._tokenizer, "added_tokens_encoder", {})
        for token in added:
            if any(token in choice for choice in choices):
                raise RequestError(
                    f"choices contain {token!r}, which is a special token of this "
                    "model and no text; leave it out, or name it in a grammar"
                )

    def _words(self) -> Any:
        """The tokenizer as llguidance wants it, made once."""
        with self._lock:
            if self._vocab is None:
                self._vocab = self._read_tokenizer()
            return self._vocab

    def _read_tokenizer(self) -> Any:
        import llguidance.hf

        try:
            with self._reading:
                return llguidance.hf.from_tokenizer(
                    self._tokenizer,
                    n_vocab=self._vocabulary,
                    eos_token=self._end_ids or None,
                )
        except Exception as error:  # it raises what it likes for other tokenizers
            raise RequestError(
                "this model's tokenizer cannot be used for constrained decoding: "
                f"{error}; leave out json_schema, regex, choices and grammar"
            ) from error


def _grammar(name: str, value: Any) -> str:
    """The constraint in llguidance's own form."""
    from llguidance import LLMatcher

    made: str
    spacing: Any = _SPACING
    if name == "json_schema":
        made = LLMatcher.grammar_from_json_schema(value, defaults=spacing)
    elif name == "grammar":
        made = LLMatcher.grammar_from_lark(value)
    else:
        pattern = value if name == "regex" else "|".join(map(_literal, value))
        made = LLMatcher.grammar_from_regex(pattern)
    return made


def _literal(text: str) -> str:
    """A pattern that matches just this text."""
    return "".join(
        c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text
    )
