"""What holds for every request's sampling parameters with one model."""

from __future__ import annotations

import threading

from pcr_core.errors import RequestError
from pcr_core.model.constraints import Constraint, Grammars
from pcr_core.model.generation_defaults import sampling_defaults
from pcr_core.model.loading import LoadedModel
from pcr_core.model.sampling import end_token_ids
from pcr_core.sampling_params import SamplingParams


class SamplingRules:
    """Checks sampling parameters and fills them in. Any thread.

    Args:
        loaded: The model and its tokenizer.
        reading: Held while the tokenizer is read: fast ones forbid concurrent use.
    """

    def __init__(self, loaded: LoadedModel, reading: threading.Lock) -> None:
        self._vocabulary = loaded.vocabulary
        self._defaults = sampling_defaults(loaded.model)
        ends = end_token_ids(loaded.model, loaded.tokenizer)
        self._grammars = Grammars(loaded.tokenizer, loaded.vocabulary, ends, reading)

    @property
    def constrains(self) -> bool:
        """Whether texts can be held to a schema, a regex or a grammar."""
        return self._grammars.usable

    def resolve(self, params: object) -> SamplingParams:
        """Return checked parameters without a ``None`` that has a default.

        Raises:
            RequestError: If they are of a wrong type or name a token that the model
                does not have.
        """
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, not {type(params).__name__}; write "
                "SamplingParams(max_tokens=32)"
            )
        self._check_tokens("logit_bias", *params.logit_bias)
        self._check_tokens("stop_token_ids", *params.stop_token_ids)
        return params.resolved(self._defaults)

    def compile(self, params: SamplingParams) -> Constraint | None:
        """Return the compiled constraint; see ``Grammars.compile``."""
        return self._grammars.compile(params)

    def _check_tokens(self, name: str, *tokens: int) -> None:
        largest = max(tokens, default=0)
        if largest >= self._vocabulary:
            raise RequestError(
                f"{name} names token {largest}, but the model has tokens 0 to "
                f"{self._vocabulary - 1}"
            )
