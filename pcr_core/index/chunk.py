"""Names and shapes of chunks: token ids -> chunk keys, model shape -> byte layout.

Knows nothing about torch, files or memory. Everything here is a pure function or a
frozen value, so that every tier derives its names from this one place.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes naming one full chunk *and every token before it*, under one namespace."""

FORMAT_VERSION = 2
"""Version of keys, chunk files and index together; part of every key."""


def _digest(tag: bytes, *fields: bytes) -> bytes:
    """blake2b-256 over tagged, length-prefixed fields.

    The prefixes make the encoding injective: no two field lists share their bytes, so
    no salt or adapter name can be chosen to collide with another field.
    """
    state = hashlib.blake2b(digest_size=32, person=b"pcr-kv-1")
    for part in (tag, *fields):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that changes KV bytes, as one digest: the root of all key chains."""

    root: bytes

    @classmethod
    def of(cls, fields: Iterable[tuple[str, bytes]]) -> Namespace:
        """Digest named fields; their order does not matter.

        Args:
            fields: Pairs such as ``("weights", digest)`` or ``("tenant", salt)``.
        """
        flat: list[bytes] = [struct.pack("<I", FORMAT_VERSION)]
        for name, value in sorted(fields):
            flat += [name.encode(), value]
        return cls(_digest(b"namespace", *flat))

    @property
    def name(self) -> str:
        """A short name for logs and statistics."""
        return self.root.hex()[:16]


def tenant_digest(namespace: str) -> bytes:
    """16 bytes that stand for a tenant; the empty namespace is ``b""``."""
    return _digest(b"tenant", namespace.encode())[:16] if namespace else b""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chunk_keys(
    namespace: Namespace, tokens: Sequence[int], chunk_tokens: int
) -> list[ChunkKey]:
    """Name every full chunk of ``tokens``, root first.

    Key ``i`` digests key ``i - 1`` and the token ids of chunk ``i``; a last partial
    chunk has no key. Costs about one microsecond per chunk of 128 tokens.
    """
    width = 4 * chunk_tokens
    packed = token_bytes(tokens)
    parent = namespace.root
    keys: list[ChunkKey] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = _digest(b"chunk", parent, packed[start : start + width])
        keys.append(ChunkKey(parent))
    return keys


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV shape of one layer. Keys and values may have different head sizes."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class ChunkLayout:
    """How a chunk's bytes are laid out: ``[layer][k|v][kv_head][token][head_dim]``.

    A DRAM slot, the data section of a chunk file and a read buffer all have this
    layout, so a layer is one contiguous run and a chunk is one read.

    Attributes:
        layers: Shape of each layer, first layer first.
        chunk_tokens: Tokens per chunk.
        dtype: Element type by its safetensors name: ``"F32"``, ``"BF16"`` or ``"F16"``.
        itemsize: Bytes per element.
    """

    layers: tuple[LayerShape, ...]
    chunk_tokens: int
    dtype: str
    itemsize: int

    def k_bytes(self, layer: int) -> int:
        """Bytes of the keys of one layer."""
        shape = self.layers[layer]
        return shape.kv_heads * self.chunk_tokens * shape.k_dim * self.itemsize

    def v_bytes(self, layer: int) -> int:
        """Bytes of the values of one layer; they follow its keys."""
        shape = self.layers[layer]
        return shape.kv_heads * self.chunk_tokens * shape.v_dim * self.itemsize

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer, and the total as a last element."""
        sizes = (self.k_bytes(i) + self.v_bytes(i) for i in range(len(self.layers)))
        return (0, *accumulate(sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of a whole chunk."""
        return self.layer_offsets[-1]

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return self.nbytes // self.chunk_tokens
