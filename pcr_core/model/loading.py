"""A model and its tokenizer, from a path, a hub id, a ``.gguf`` file or a package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcr_core.config import EngineConfig
from pcr_core.errors import ConfigError, ModelError, UnsupportedModelError
from pcr_core.index.chunk import LayerShape
from pcr_core.model._compat import dequantize_options
from pcr_core.model.cpu_dtype import suited_to_cpu

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_TOKEN_LAYERS = {
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
}
# Rotary embeddings whose frequencies change with the length of the whole sequence:
# below the original window they do not, so that is the window we can serve.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_UNBOUNDED = 1 << 20


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the engine must know about it.

    Attributes:
        model: A transformers causal language model in eval mode.
        tokenizer: Its tokenizer.
        name: Short name for people.
        device: Where it runs.
        dtype: What it computes KV in.
        shapes: KV shape of every layer, read from a probe forward.
        context_window: Longest sequence, in tokens.
    """

    model: Any
    tokenizer: Any
    name: str
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    context_window: int

    @property
    def safetensors_dtype(self) -> str:
        """The dtype by its safetensors name."""
        return _DTYPES[self.dtype]

    @property
    def vocabulary(self) -> int:
        """Number of logits: the tokenizer's ids, and often some for padding."""
        head = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        return int(head.weight.shape[0])


def load(config: EngineConfig, model: Any = None, tokenizer: Any = None) -> LoadedModel:
    """Load what ``config`` names, or take objects that are loaded already.

    Raises:
        ConfigError: If there is no such model, device or tokenizer.
        ModelError: If transformers cannot load it; its reason is quoted.
        UnsupportedModelError: If it keeps state other than per-token KV.
    """
    if model is not None and tokenizer is None:
        raise ConfigError("model= was given without tokenizer=; pass both")
    if model is None:
        name, model, tokenizer = _from_pretrained(config, tokenizer)
    else:
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    _refuse_recurrent(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=Path(name).name,
        device=model.get_input_embeddings().weight.device,
        dtype=_kv_dtype(model),
        shapes=probe_shapes(model),
        context_window=context_window(model.config, tokenizer),
    )


def _from_pretrained(config: EngineConfig, tokenizer: Any) -> tuple[str, Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = _device(config.device)  # first: a wrong one must not cost a conversion
    source, options = _locate(config)
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(source, **_only_gguf(options))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except Exception as error:  # file formats and remote code raise their own kinds
        raise ModelError(
            f"transformers cannot load {config.model or source!r}: {error}"
        ) from error
    _refuse_foreign_tokenizer(model, tokenizer)
    model = torch.nn.Module.to(model, device)
    if config.dtype == "auto" and torch.device(device).type == "cpu":
        model = suited_to_cpu(model)
    return str(config.model or source), model, tokenizer


def _refuse_foreign_tokenizer(model: Any, tokenizer: Any) -> None:
    """From a folder without a tokenizer transformers 5.0 makes up one of 8 tokens."""
    tokens, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    if tokens < rows // 2:
        raise ModelError(
            f"the tokenizer has {tokens} tokens, the model {rows}: it is not this "
            "model's; save the model's tokenizer beside it, or pass tokenizer="
        )


_MODEL_FILES = ("config.json", "adapter_config.json")


def _locate(config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """What to pass to ``from_pretrained``."""
    if config.model is None:
        from pcr_core.model.packaged import packaged_model_dir

        return str(packaged_model_dir(config.cache_path)), {}
    path = Path(config.model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model: there is no file {path}")
        return str(path.parent), {"gguf_file": path.name, **dequantize_options()}
    looks_local = config.model.startswith((".", "/", "~"))
    if looks_local and not path.is_dir():
        raise ConfigError(f"model: there is no folder {path}")
    if path.is_dir() and not any((path / name).is_file() for name in _MODEL_FILES):
        raise ConfigError(
            f"model: {path} is not a model's folder, it has no config.json; give the "
            "folder that save_pretrained wrote, a .gguf file or a hub id"
        )
    return str(path) if path.is_dir() else config.model, {}


def _only_gguf(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key == "gguf_file"}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "device: torch sees no CUDA device; use device='cpu' or 'auto'"
        )
    return torch.device(name)


def _kv_dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = model.dtype
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"KV in {dtype} is not supported; load the model in float32, bfloat16 or "
            "float16"
        )
    return dtype


def _refuse_recurrent(model: Any) -> None:
    """Refuse models whose layers keep more than keys and values of each token."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; prefixes can be "
            "reused in decoder-only models"
        )
    # The second is what some hybrid models had before transformers 5.x unified it.
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or getattr(config, "layers_block_type", None) or ()
    others = [
        f"{i} ({kind})" for i, kind in enumerate(kinds) if kind not in _TOKEN_LAYERS
    ]
    if others:
        raise UnsupportedModelError(
            f"layers {', '.join(others)} of {type(model).__name__} keep recurrent or "
            "linear-attention state, which a chunk of KV cannot hold; use a model "
            "whose layers are all full or sliding attention"
        )


def probe_shapes(model: Any) -> tuple[LayerShape, ...]:
    """KV shape of every layer, from a forward of four tokens.

    Read, not guessed from the configuration: heads and head sizes may differ by layer
    and between K and V, and some layers share the KV of others.
    """
    from transformers import DynamicCache

    from pcr_core.model import _compat

    cache = DynamicCache()
    ids = torch.zeros(
        1, 4, dtype=torch.long, device=model.get_input_embeddings().weight.device
    )
    arguments: dict[str, Any] = {
        _compat.cache_argument(model): cache,
        "use_cache": True,
    }
    try:
        with torch.inference_mode():
            model(input_ids=ids, **arguments)
    except Exception as error:  # whatever the model's code raises about the cache
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on transformers' DynamicCache, so "
            f"its state cannot be stored per token: {error}"
        ) from error
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or keys.ndim != 4 or keys.shape[2] != 4:
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} stores no keys and values "
                "per token; recurrent and linear-attention models cannot be served"
            )
        assert values is not None  # a layer has both or neither
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} stored keys and values in the cache; "
            "recurrent and state-space models cannot be served"
        )
    return tuple(shapes)


def context_window(config: Any, tokenizer: Any) -> int:
    """Longest sequence the model takes, in tokens."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = (
        [rope]
        if "rope_type" in rope
        else [r for r in rope.values() if isinstance(r, dict)]
    )
    if any(kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE for kind in kinds):
        original = [kind.get("original_max_position_embeddings") for kind in kinds]
        original.append(getattr(text, "original_max_position_embeddings", None))
        known = [length for length in original if length]
        if known:
            return int(min(known))
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if length:
            return int(length)
    return int(min(getattr(tokenizer, "model_max_length", _UNBOUNDED), _UNBOUNDED))
