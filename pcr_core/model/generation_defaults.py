"""What a model's generation config says about sampling."""

from __future__ import annotations

import logging
from typing import Any

from pcr_core.errors import RequestError
from pcr_core.sampling_params import SamplingDefaults, SamplingParams

_log = logging.getLogger("pcr_core.model")

_TAKEN = ("top_p", "top_k", "min_p", "repetition_penalty")
_NOT_TAKEN = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "constraints",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "suppress_tokens",
    "top_h",
    "typical_p",
    "watermarking_config",
)
_HARMLESS: tuple[Any, ...] = (None, 0, 0.0, 1, 1.0, [], {})


def sampling_defaults(model: Any) -> SamplingDefaults:
    """Return the defaults that a model's generation config gives.

    As with ``model.generate``, ``do_sample`` decides whether decoding is greedy or at
    the config's temperature (1.0 if it names none). The other fields are taken as they
    are written; what is not written is off, whereas ``generate`` has a ``top_k`` of 50.
    What cannot be taken over, or is out of range, is logged.
    """
    written = _written(getattr(model, "generation_config", None))
    ignored = [name for name in _NOT_TAKEN if written.get(name) not in _HARMLESS]
    if ignored:
        _log.warning(
            "the model's generation config sets %s, which this engine does not apply",
            ", ".join(ignored),
        )
    wanted = {name: written.get(name) for name in _TAKEN}
    if written.get("do_sample"):
        wanted["temperature"] = written.get("temperature", 1.0)
    fields = {name: value for name, value in wanted.items() if value is not None}
    return SamplingDefaults(**{k: v for k, v in fields.items() if _is_valid(k, v)})


def _written(config: Any) -> dict[str, Any]:
    """What the config says beyond transformers' own defaults."""
    if config is None:
        return {}
    written: dict[str, Any] = config.to_diff_dict()
    return {name: value for name, value in written.items() if value is not None}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        _log.warning("the model's generation config is not followed: %s", error)
        return False
    return True
