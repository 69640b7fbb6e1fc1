"""The pieces of the engine's forward pass, put together one by one on one model.

Nothing here is a switch of the engine: each piece is a context that prepares a model,
or a cache, and the engine enters all of them. Two things keep the pieces from being
wholly separate. Linear layers run in row tiles and on packed weights by one plan, since
the kernel is chosen together with its tiles. And our cache and our lean layers hand
masks over as ``LazyMask``, so stock attention beside them gets an adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pcr_core import EngineConfig
from pcr_core.memory import join_pages
from pcr_core.model._compat import cache_argument
from pcr_core.model.attention import (
    AttentionPlan,
    KvAttention,
    attention_installed,
)
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.glue import Glue, TorchGlue
from pcr_core.model.lean import lean_layers_installed
from pcr_core.model.linear import (
    LayerPlan,
    Shape,
    packed_memory,
    plan_layers,
    row_tiles_installed,
)
from pcr_core.model.loading import LoadedModel, load
from pcr_core.model.output_head import head_installed
from pcr_core.model.prefill_plan import Cuts, free
from pcr_core.model.runner import Runner
from pcr_core.model.setup import identity, known_verdict, model_prepared

PIECES = ("kv", "linear", "pages", "attention", "lean", "compiled", "head")
"""Preallocated KV instead of concatenation; linear layers in row tiles, packed where
that measured better; their packed weights in huge pages; grouped-head attention; lean
layers; what is between their products compiled; the output head packed."""

_NEEDS = {"pages": "linear", "compiled": "lean"}
"""Pieces that are nothing without another."""

_CHUNK = 32


@dataclass(frozen=True)
class Plans:
    """What the start-up probes found.

    Attributes:
        attention: How attention is computed.
        layers: How linear layers of each shape run, those of lean layers among them.
        head: How the output head runs in decode steps.
        cuts: How the engine pads and cuts prefills.
        glue: What the engine computes with between the products of lean layers.
    """

    attention: AttentionPlan
    layers: Mapping[Shape, LayerPlan]
    head: LayerPlan | None
    cuts: Cuts
    glue: Glue


def engine_plans(loaded: LoadedModel, config: EngineConfig) -> Plans:
    """The engine's own plans, and those for layers that it would have fused."""
    with model_prepared(loaded, config) as prepared:
        cuts, glue = prepared.runner.cuts, prepared.glue.glue
    _, verdict = known_verdict(loaded, config, identity(loaded, glue))
    if verdict is None:
        raise SystemExit(f"the engine's verdict cannot be kept in {config.cache_path}")
    layers = {**plan_layers(loaded.model), **verdict.layers}
    return Plans(verdict.attention, layers, verdict.head, cuts, glue)


def opened(dtype: str, options: Any, folder: Path) -> tuple[LoadedModel, Plans]:
    """The model of a benchmark, and what the engine would do with it."""
    config = EngineConfig(
        model=options.model,
        cache_dir=options.cache or folder,
        dtype=dtype,
        threads=options.threads,
        overlap="none",
    )
    loaded = load(config)
    return loaded, engine_plans(loaded, config)


class StockAttention(KvAttention):
    """transformers' sdpa: K and V are expanded to all heads where it has a mask."""

    name = "sdpa-of-lazy-masks"

    def __init__(self) -> None:
        super().__init__(AttentionPlan())

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """See ``KvAttention``; gets the keys in use, as from a ``DynamicCache``."""
        count, first = query.shape[2], attention_mask.first
        stop, mask = first + count, None
        if count > 1 and first:
            mask = attention_mask.block(0, count, stop, query)
        keys, values = key[:, :, :stop], value[:, :, :stop]
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, keys, values, mask, dropout, scaling, **options
        )
        return found


class Forward(Protocol):
    """One row of one model. Logits are ``[1, vocabulary]``, of the last token."""

    def cold(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute a whole prompt; the row then holds it."""

    def hit(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """Compute ``ids`` over the first ``start`` tokens that the row holds."""

    def step(self, token: int) -> torch.Tensor:
        """Append one token."""

    def rewind(self, tokens: int) -> None:
        """Take back as many tokens."""


class Concatenating:
    """A model on transformers' ``DynamicCache``.

    Args:
        model: See above.
        last_only: Whether logits of the last position only are computed.
    """

    def __init__(self, model: Any, *, last_only: bool = True) -> None:
        self._model = model
        self._name = cache_argument(model)
        self._keep = {"logits_to_keep": 1} if last_only else {}
        self._cache = DynamicCache()

    def cold(self, ids: Sequence[int]) -> torch.Tensor:
        """See ``Forward``."""
        self._cache = DynamicCache(config=self._model.config)
        return self._run(ids)

    def hit(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """See ``Forward``."""
        self.rewind(self._cache.get_seq_length() - start)
        return self._run(ids)

    def step(self, token: int) -> torch.Tensor:
        """See ``Forward``."""
        return self._run([token])

    def rewind(self, tokens: int) -> None:
        """See ``Forward``."""
        if tokens:
            self._cache.crop(-tokens)

    @torch.inference_mode()
    def _run(self, ids: Sequence[int]) -> torch.Tensor:
        options: dict[str, Any] = {self._name: self._cache, **self._keep}
        ids = torch.tensor([list(ids)])
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, **options)[0]
        return logits[:, -1]


class Preallocated:
    """A model on the engine's runner and its rows.

    Args:
        loaded: See above.
        cuts: How prefills are padded.
        tokens: Positions of the row.
    """

    def __init__(self, loaded: LoadedModel, cuts: Cuts, tokens: int) -> None:
        self._runner = Runner(loaded, _CHUNK, cuts)
        self._row = self._runner.open_row(tokens)
        self._io = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)

    def cold(self, ids: Sequence[int]) -> torch.Tensor:
        """See ``Forward``."""
        return self._runner.prefill(self._row, ids, self._io).logits

    def hit(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """See ``Forward``."""
        self._row.cache.begin(start)
        try:
            return self._runner.forward_range(self._row, ids, start)
        finally:
            self._row.cache.end(len(ids))

    def step(self, token: int) -> torch.Tensor:
        """See ``Forward``."""
        return self._runner.decode([self._row], [token])

    def rewind(self, tokens: int) -> None:
        """See ``Forward``."""
        self._row.cache.rewind(tokens)


def twin(model: Any) -> Any:
    """A second model with the same weights, not copies of them."""
    shared = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def compose(
    loaded: LoadedModel,
    plans: Plans,
    pieces: Collection[str],
    tokens: int,
    lifetimes: ExitStack,
    cuts: Cuts | None = None,
) -> Forward:
    """A model with some of the engine's pieces, until ``lifetimes`` ends.

    Args:
        loaded: Whose weights it has; stays as it is.
        plans: How the pieces run.
        pieces: Of ``PIECES``.
        tokens: Positions of its row.
        lifetimes: Takes everything down.
        cuts: How prefills are padded; by default not at all.
    """
    model = twin(loaded.model)
    ours = "attention" in pieces
    attention = KvAttention(plans.attention) if ours else StockAttention()
    if ours or {"kv", "lean"} & set(pieces):
        lifetimes.enter_context(attention_installed(model, attention))
    if "lean" in pieces:
        glue = plans.glue if "compiled" in pieces else TorchGlue()
        lifetimes.enter_context(lean_layers_installed(model, attention, glue))
    if "linear" in pieces:
        lifetimes.enter_context(row_tiles_installed(model, plans.layers))
    if "pages" in pieces:
        join_pages(packed_memory(model))
    if "head" in pieces:
        lifetimes.enter_context(head_installed(model, plans.head))
    if "kv" in pieces:
        return Preallocated(replace(loaded, model=model), cuts or free(), tokens)
    return Concatenating(model)


Maker = Callable[[ExitStack], Forward]


def variants(loaded: LoadedModel, plans: Plans, tokens: int) -> dict[str, Maker]:
    """Stock, each piece alone, all together, all but one, and the engine itself."""

    def of(pieces: Collection[str], cuts: Cuts | None = None) -> Maker:
        return lambda stack: compose(loaded, plans, pieces, tokens, stack, cuts)

    every = set(PIECES)
    return {
        "stock": of(()),
        "stock, all logits": lambda _: Concatenating(
            twin(loaded.model), last_only=False
        ),
        **{f"+ {piece}": of({piece}) for piece in PIECES if piece not in _NEEDS},
        **{
            f"+ {needed}, {piece}": of({needed, piece})
            for piece, needed in _NEEDS.items()
        },
        "all": of(every),
        **{f"all - {piece}": of(every - {piece}) for piece in PIECES},
        "engine": of(every, plans.cuts),
    }
