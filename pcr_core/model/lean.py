"""Decoder layers of the Llama kind with less around their matrix products (CPU).

At a question's few tokens, and even more at one token of a decode step, half of a layer
is not arithmetic but calls: seven small linear layers, a dozen elementwise operations,
module plumbing. For the duration of an engine such a layer's ``forward`` is replaced by
one that computes query, key and value in one product, gate and up in another, and what
is between products in few operations (``glue``), on each piece of a product while it is
in cache. Structure, names and model code stay.

A layer is recognised by its parts and then put to the test: on noise it must give what
its own ``forward`` gives, up to rounding. All others are left alone, as are layers with
hooks; a hook that is put on a part of a layer later is not called. Results differ
from stock ones by roundings; within an engine everything runs the same way, so reuse
changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pcr_core.model import _compat
from pcr_core.model.fused import Fused, keep_fused
from pcr_core.model.glue import Angles, Glue
from pcr_core.model.products import pieces, room
from pcr_core.model.rounding import differ_by_rounding
from pcr_core.model.scratch import KEPT_ROWS, Scratch

_ROWS = 32


class _Angles:
    """Rotary angles of one forward, as the glue wants them; shared by all layers.

    Args:
        glue: See above.
    """

    def __init__(self, glue: Glue) -> None:
        self._glue = glue
        self._of: torch.Tensor | None = None
        self._ready: Angles | None = None

    def get(self, cos: torch.Tensor, sin: torch.Tensor, batch: int) -> Angles:
        """Those of every row, from ``[batch or 1, n, dim]``."""
        if self._of is not sin or self._ready is None:
            rows = (x.expand(batch, -1, -1).flatten(0, 1) for x in (cos, sin))
            self._of, self._ready = sin, self._glue.angles(*rows)
        return self._ready


class LeanLayer:
    """The forward of one decoder layer.

    Args:
        layer: A layer that ``is_llama_like``.
        attention: The engine's attention function.
        glue: What computes between the products.
        angles: Shared by all layers of the model.
        scratch: Shared by all layers of the model.
    """

    def __init__(
        self,
        layer: Any,
        attention: Callable[..., Any],
        glue: Glue,
        angles: _Angles,
        scratch: Scratch,
    ) -> None:
        block, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._block = block
        self._attention = attention
        self._glue = glue
        self._angles = angles
        self._scratch = scratch
        self._dim: int = block.head_dim
        self._heads: int = block.q_proj.out_features // self._dim
        self._kv_heads: int = block.k_proj.out_features // self._dim
        self._inner: int = mlp.gate_proj.out_features
        self._out: nn.Linear = block.o_proj
        self._down: nn.Linear = mlp.down_proj
        self._before = _Norm(layer.input_layernorm)
        self._after = _Norm(layer.post_attention_layernorm)
        self.qkv = Fused([block.q_proj, block.k_proj, block.v_proj])
        try:
            self.gate_up = Fused([mlp.gate_proj, mlp.up_proj])
        except BaseException:
            self.qkv.remove()
            raise
        layer.__dict__["forward"] = self.forward

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """``[batch, n, width]`` -> the same shape."""
        batch, each, width = hidden_states.shape
        few, count = each == 1, batch * each
        if hidden_states.dtype is not self._before.weight.dtype:
            own = self._before.weight.dtype
            raise ValueError(f"a layer in {own} was given {hidden_states.dtype}")
        x = hidden_states.reshape(count, width).contiguous()
        ample = max(room(f.linear, count, few=few) for f in (self.qkv, self.gate_up))
        normed = self._scratch.rows("normed", x, count, ample, width)
        self._glue.norm(x, self._before.weight, self._before.eps, normed[:count])
        heads = self._turned(normed, position_embeddings, (batch, each))
        cache = options.get("cache", options.get("past_key_values"))
        mixed = self._mix(heads, attention_mask, cache, count, few=few)
        del heads  # a long prompt's are large
        total = torch.empty_like(x)
        weight, eps = self._after.weight, self._after.eps
        for at, part in pieces(self._out, mixed, count, few=few):
            from_x, to, also = (_beside(part, at, all_) for all_ in (x, total, normed))
            self._glue.add_norm(from_x, part, weight, eps, to, also)
        del mixed
        ample = room(self._down, count, few=few)
        inner = self._scratch.rows("inner", x, count, ample, self._inner)
        for at, part in pieces(self.gate_up.linear, normed, count, few=few):
            self._glue.gate(part, _beside(part, at, inner))
        for at, part in pieces(self._down, inner, count, few=few):
            self._glue.add(_beside(part, at, total), part)
        return total.view(hidden_states.shape)

    def _turned(
        self, normed: torch.Tensor, positions: Any, shape: tuple[int, int]
    ) -> torch.Tensor:
        """Query, key and value heads ``[batch, n, heads, dim]``, at their positions."""
        batch, each = shape
        count, turning = batch * each, self._heads + self._kv_heads
        cos, sin = self._angles.get(positions[0], positions[1], batch)
        for angles in (cos, sin):  # compiled glue would read beyond their end
            if (angles.shape[0], angles.shape[-1]) != (count, self._dim):
                raise ValueError(
                    f"rotary positions {tuple(angles.shape)} of {count} tokens with "
                    f"heads of {self._dim}"
                )
        all_heads = turning + self._kv_heads
        out: torch.Tensor | None = None
        for at, part in pieces(self.qkv.linear, normed, count, few=each == 1):
            heads = part.view(-1, all_heads, self._dim)
            if out is None:
                whole = heads.shape[0] == count
                out = heads if whole else heads.new_empty(count, *heads.shape[1:])
            here = _beside(heads, at, cos), _beside(heads, at, sin)
            self._glue.turn(heads, turning, here, _beside(heads, at, out))
        assert out is not None
        return out.view(batch, each, all_heads, self._dim)

    def _mix(
        self, heads: torch.Tensor, mask: Any, cache: Any, count: int, *, few: bool
    ) -> torch.Tensor:
        """Self-attention: ``[at least count, width]``."""
        block, turning = self._block, self._heads + self._kv_heads
        heads = heads.transpose(1, 2)
        query, key = heads[:, : self._heads], heads[:, self._heads : turning]
        value = heads[:, turning:]
        if cache is not None:
            key, value = cache.update(key, value, block.layer_idx)
        out, _ = self._attention(block, query, key, value, mask, scaling=block.scaling)
        mixed: torch.Tensor = out.reshape(count, -1)
        ample = room(self._out, count, few=few)
        if ample == count or ample > KEPT_ROWS:
            return mixed
        padded = self._scratch.rows("mixed", mixed, count, ample, mixed.shape[1])
        padded[:count] = mixed
        return padded

    def remove(self) -> None:
        """Put everything back."""
        del self._layer.__dict__["forward"]
        self.qkv.remove()
        self.gate_up.remove()


class _Norm:
    """What an RMS norm multiplies with, looked up once."""

    def __init__(self, norm: Any) -> None:
        self.weight: torch.Tensor = norm.weight.detach().contiguous()
        self.eps: float = norm.variance_epsilon


def _beside(part: torch.Tensor, at: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows that belong to a piece which begins at row ``at``."""
    count = part.shape[0]
    if at == 0 and count == rows.shape[0]:
        return rows
    return rows[at : at + count]


def _decoder(model: Any) -> Any:
    """The module that holds the decoder layers, or ``None``."""
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    return inner if isinstance(layers, nn.ModuleList) and len(layers) else None


_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


def is_llama_like(layer: Any) -> bool:
    """Whether a layer has exactly the parts of a Llama layer, none of them hooked."""
    for name, expected in _PARTS.items():
        module = getattr(layer, name, None) if name else layer
        if not isinstance(module, nn.Module):
            return False
        if {child for child, _ in module.named_children()} != expected:
            return False
    linears = (
        *(getattr(layer.self_attn, name) for name in _PARTS["self_attn"]),
        *(getattr(layer.mlp, name) for name in _PARTS["mlp"] - {"act_fn"}),
    )
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    block, mlp = layer.self_attn, layer.mlp
    return (
        all(
            type(one) is nn.Linear and one.weight.device.type == "cpu"
            for one in linears
        )
        and _one_kind([block.q_proj, block.k_proj, block.v_proj])
        and _one_kind([mlp.gate_proj, mlp.up_proj])
        and _fits_together(layer)
        and len({one.weight.dtype for one in (*linears, *norms)}) == 1
        and "silu" in type(mlp.act_fn).__name__.lower()
        and all(isinstance(getattr(n, "variance_epsilon", None), float) for n in norms)
        and all([name for name, _ in n.named_parameters()] == ["weight"] for n in norms)
        and all(hasattr(block, name) for name in ("head_dim", "scaling", "layer_idx"))
        and not any(_is_hooked(module) for module in layer.modules())
    )


def lean_candidates(model: Any) -> list[bool]:
    """Which layers have the parts of a Llama layer, by index.

    With the weights this decides which run lean, and so which bits are computed.
    """
    inner = _decoder(model)
    return [is_llama_like(layer) for layer in inner.layers] if inner else []


def _one_kind(layers: Sequence[nn.Linear]) -> bool:
    return len({one.bias is None for one in layers}) == 1


def _fits_together(layer: Any) -> bool:
    """Whether all sizes are those of a Llama layer: compiled glue does not check."""
    block, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    width, dim = block.q_proj.in_features, getattr(block, "head_dim", 0)
    q, k = block.q_proj.out_features, block.k_proj.out_features
    inner = mlp.gate_proj.out_features
    norms = (norm.weight, layer.post_attention_layernorm.weight)
    return (
        isinstance(dim, int)
        and dim > 0
        and dim % 2 == 0
        and q % dim == 0
        and k % dim == 0
        and block.v_proj.out_features == k
        and (block.o_proj.in_features, block.o_proj.out_features) == (q, width)
        and mlp.up_proj.out_features == inner
        and (mlp.down_proj.in_features, mlp.down_proj.out_features) == (inner, width)
        and mlp.gate_proj.in_features == width
        and all(w.shape == (width,) and w.device.type == "cpu" for w in norms)
    )


def _is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001
    return "forward" in module.__dict__ or any(hooks)


class _Echo:
    """A cache that holds nothing."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Give back what came."""
        return key, value


def _trial(model: Any, layer: Any) -> torch.Tensor | None:
    """What a layer makes of noise; ``None`` if it cannot be called like this."""
    from transformers.masking_utils import causal_mask_function

    from pcr_core.model.masks import LazyMask

    inner = _decoder(model)
    weight = layer.self_attn.o_proj.weight
    noise = torch.Generator().manual_seed(0)
    width = layer.input_layernorm.weight.shape[0]
    x = torch.randn(1, _ROWS, width, generator=noise).to(weight.dtype)
    positions = torch.arange(_ROWS)[None]
    try:
        with torch.inference_mode():
            angles = inner.rotary_emb(x, position_ids=positions)
            out: object = layer(
                x,
                attention_mask=LazyMask(causal_mask_function, 0, _ROWS, _ROWS),
                position_embeddings=angles,
                position_ids=positions,
                use_cache=True,
                **{_compat.cache_argument(model): _Echo()},
            )
    except Exception:  # whatever this model's code asks for beyond that
        return None
    return out if isinstance(out, torch.Tensor) else None


def _agree(stock: torch.Tensor, lean: torch.Tensor | None) -> bool:
    if lean is None or stock.shape != lean.shape:
        return False
    return differ_by_rounding(stock, lean, stock.dtype)


def _tried(model: Any, layer: Any, make: Callable[[], LeanLayer]) -> LeanLayer | None:
    """The layer, lean, if it then gives what its own ``forward`` gives."""
    stock = _trial(model, layer)
    if stock is None:
        return None
    with ExitStack() as undo:
        lean = make()
        undo.callback(lean.remove)
        if not _agree(stock, _trial(model, layer)):
            return None
        undo.pop_all()
        return lean


@contextmanager
def lean_layers_installed(
    model: Any, attention: Callable[..., Any], glue: Glue
) -> Iterator[int]:
    """Let the model's layers of the Llama kind run lean; put them back afterwards.

    To be entered with the engine's attention installed, and before its row tiles.

    Args:
        model: Runs with ``attention`` already.
        attention: The engine's attention function.
        glue: What computes between the products; layers of another dtype are left
            alone.

    Yields:
        How many layers run lean.
    """
    scratch, angles = Scratch(), _Angles(glue)
    installed: list[LeanLayer] = []
    found = lean_candidates(model)
    layers = [model.model.layers[index] for index, lean in enumerate(found) if lean]
    with ExitStack() as lifetimes:
        for layer in layers:
            if glue.dtype not in (None, layer.input_layernorm.weight.dtype):
                continue
            make = partial(LeanLayer, layer, attention, glue, angles, scratch)
            lean = _tried(model, layer, make)
            if lean is not None:
                installed.append(lean)
                lifetimes.callback(lean.remove)
        linears = [one.linear for lean in installed for one in (lean.qkv, lean.gate_up)]
        keep_fused(model, linears)
        lifetimes.callback(keep_fused, model, None)
        yield len(installed)
