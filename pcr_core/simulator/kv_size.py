"""How many bytes of KV a token has: from a model's numbers or its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcr_core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by dtype."""

_HEADER = 4096  # bytes: a chunk file's header fills whole blocks of that
_PER_LAYER, _PER_TOKEN = 250, 8  # bytes of header text: checksums, token ids


@dataclass(frozen=True, slots=True)
class KvSize:
    """Size of a model's KV.

    Attributes:
        layers: Layers with attention.
        kv_heads: Key and value heads per layer.
        head_dim: Numbers per head.
        dtype: Of the KV: one of ``DTYPE_BYTES``.

    Raises:
        ConfigError: If a number is below 1 or the dtype is unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a number from 1 on")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        per_layer = 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.layers * per_layer

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of so many tokens in DRAM."""
        return tokens * self.token_bytes

    def file_bytes(self, tokens: int) -> int:
        """Bytes of its file on SSD: header and data."""
        text = self.layers * _PER_LAYER + tokens * _PER_TOKEN
        return -(-text // _HEADER) * _HEADER + self.chunk_bytes(tokens)


PACKAGED = KvSize(layers=30, kv_heads=3, head_dim=64)
"""SmolLM2-135M-Instruct, which ``model=None`` stands for."""


def read_kv_size(model: str, dtype: str = "auto") -> KvSize:
    """From the ``config.json`` of a model.

    Args:
        model: Its folder, that file, or the hub id of a model that was downloaded.
        dtype: Of the KV; ``"auto"`` for what the checkpoint was saved in.

    Raises:
        ConfigError: If there is no such file, or it does not say what is needed.
    """
    path = _config_file(model)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the config.json of a model")
    return kv_size_of(config, dtype, name=str(path))


def _config_file(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        return path
    if path.suffix != ".gguf" and not path.exists():
        # Only a hub id needs it; it looks into the local cache and never downloads.
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json")
        except ValueError:  # a path, or nothing that could be an id
            found = None
        if isinstance(found, str):
            return Path(found)
    raise ConfigError(
        f"there is no config.json of {model!r} here; name the model's folder, or give "
        "layers, kv_heads and head_dim"
    )


def kv_size_of(
    config: Mapping[str, Any], dtype: str = "auto", *, name: str = "the config"
) -> KvSize:
    """From the values of a ``config.json``.

    Args:
        config: As transformers writes it.
        dtype: As for ``read_kv_size``.
        name: For messages.

    Raises:
        ConfigError: If it does not say what is needed.
    """
    # Models that also see or hear keep the numbers of their text part one level down.
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if config.get("kv_lora_rank"):
        raise ConfigError(
            f"{name} is of a model with latent attention, whose KV has another size; "
            "give layers, kv_heads and head_dim that come to it"
        )
    try:
        heads = config["num_attention_heads"]
        saved = config.get("dtype") or config.get("torch_dtype") or "float32"
        return KvSize(
            config["num_hidden_layers"],
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            saved if dtype == "auto" else dtype,
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{name} does not say how large the KV is ({error}); give layers, kv_heads "
            "and head_dim"
        ) from None
