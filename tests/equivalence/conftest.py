"""A model with tiers that can be lost and reopened, and the same model without any.

``World.ask`` serves a prompt as the engine does, recording the bits of every logits
row; ``World.reference`` runs the same prompt on the same kernels with no cache at all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcr_core.config import EngineConfig
from pcr_core.index.chunk import ChunkLayout, chunk_keys
from pcr_core.index.prefix_tree import Event, Host
from pcr_core.loop import EngineLoop
from pcr_core.model import generation as generation_module
from pcr_core.model import probe, setup
from pcr_core.model.chunk_io import ChunkIO
from pcr_core.model.loading import load
from pcr_core.model.runner import Runner
from pcr_core.model.sampling import Sampler
from pcr_core.model.setup import model_prepared
from pcr_core.request import Request, SamplingParams
from pcr_core.result import Usage
from pcr_core.service import tier_settings
from pcr_core.tiers import ChunkStore, CudaRegistrar, TierManager, open_tiers
from pcr_core.tiers.store.chunk_file import ChunkFormat, chunk_path

STEPS = 3
"""Tokens generated per prompt."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a request gave, down to the bits of every logits row."""

    tokens: list[int]
    logits: list[bytes]
    usage: Usage | None = dataclasses.field(default=None, compare=False)


class Recorder(Sampler):
    """The engine's sampler, keeping the raw bytes of what it was given."""

    rows: list[bytes]

    def choose(self, logits: torch.Tensor) -> int:
        Recorder.rows.append(raw_bytes(logits))
        return super().choose(logits)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def registrar_of(device: torch.device) -> CudaRegistrar | None:
    """Page-locks DRAM where there is a GPU."""
    return CudaRegistrar(device) if device.type == "cuda" else None


class World:
    """One prepared model. Its tiers are opened and closed as a test asks.

    Attributes:
        seen: Tokens reused by tier, and holes, over all requests.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig) -> None:
        self._exit = ExitStack()
        self.loaded = load(config, model, tokenizer)
        prepared = self._exit.enter_context(model_prepared(self.loaded, config))
        self.runner, self.namespace = prepared.runner, prepared.namespace
        self.config, self.chunk = config, config.chunk_tokens
        # Of its own, so that no reference leaves a row that a request goes on from.
        self._alone = Runner(self.loaded, self.chunk, self.runner.cuts)
        self.layout = ChunkLayout(
            self.loaded.shapes,
            self.chunk,
            self.loaded.safetensors_dtype,
            self.loaded.dtype.itemsize,
        )
        self.file_nbytes = ChunkFormat(self.layout, self.namespace).file_nbytes
        self.seen: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._known: dict[tuple[int, ...], Answer] = {}
        self.tiers: TierManager | None = None

    def open(self, folder: Path, *, slots: int, files: int) -> None:
        """Open the tiers on ``folder``; what was open is closed first."""
        self.shut()
        self.runner.forget()
        self.tiers = open_tiers(
            self.layout,
            self.namespace,
            tier_settings(self.config, self.runner.cuts),
            dram_bytes=-(-slots * self.layout.nbytes // 4096) * 4096,  # whole pages
            cache_dir=folder,
            ssd_bytes=files * self.file_nbytes,
            registrar=registrar_of(self.loaded.device),
        )
        store = self.tiers._store
        if isinstance(store, ChunkStore):
            store._least_read = 1  # the layers are tiny, but each is to come by itself
        self._loop = EngineLoop(self.runner, self.loaded.tokenizer, (), self.tiers)

    def shut(self) -> None:
        """Close the tiers: what follows is a restart."""
        if self.tiers is not None:
            stats = self.tiers.snapshot()
            self.seen["holes"] += stats.holes
            self.seen["corrupt"] += stats.corrupt
            self.seen["missing"] += stats.missing
            self.seen["evicted"] += stats.dram_evictions + stats.ssd_evictions
            counted = Counter(
                device=stats.device_hit_tokens,
                dram=stats.dram_hit_tokens,
                ssd=stats.ssd_hit_tokens,
                computed=stats.miss_tokens,
            )
            assert counted == self._used, "requests and counters disagree"
            self._used.clear()
            self.tiers.close()
            self.tiers = None

    def ask(self, tokens: Sequence[int], **params: Any) -> Answer:
        """Serve one request by hand, step by step."""
        assert self.tiers is not None
        Recorder.rows = []
        keys = chunk_keys(self.namespace, tokens, self.chunk)
        request = Request(
            list(tokens), keys, SamplingParams(max_tokens=STEPS, **params)
        )
        self._loop.add(request)
        while self._loop.busy:
            self._loop.step()
        result = request.completion.result(timeout=0)
        self.seen.update(result.usage.cached_by_tier)
        self._used.update(result.usage.cached_by_tier)
        self._used["computed"] += result.usage.computed_tokens
        return Answer(result.token_ids, Recorder.rows, result.usage)

    def reference(self, tokens: Sequence[int]) -> Answer:
        """The same prompt, nothing stored, nothing read."""
        name = tuple(tokens)
        if name not in self._known:
            self._known[name] = self._run_alone(list(tokens))
        return self._known[name]

    def _run_alone(self, tokens: list[int]) -> Answer:
        row = self._alone.open_row(len(tokens) + STEPS)
        nothing = ChunkIO({}, {}, filled=lambda index: None, between=lambda: None)
        logits = self._alone.prefill(row, tokens, nothing).logits
        chosen, rows = [int(logits.float().argmax())], [raw_bytes(logits)]
        while len(chosen) < STEPS:
            logits = self._alone.decode([row], chosen[-1:])
            chosen.append(int(logits.float().argmax()))
            rows.append(raw_bytes(logits))
        self._alone.close_row(row)
        return Answer(chosen, rows)

    def lose(
        self, folder: Path, tokens: Sequence[int], holes: Iterable[int], how: str
    ) -> None:
        """Lose chunks of a prompt, in DRAM and on SSD, as ``how`` says."""
        assert self.tiers is not None
        self.tiers.flush()
        keys = chunk_keys(self.namespace, tokens, self.chunk)
        nodes = self.tiers._tree.match(keys)
        for index in holes:
            if index >= len(keys):
                continue
            node = nodes[index]
            if node is not None and node.host is Host.READY:
                self.tiers._dram.free(node, Event.EVICT)
            if how != "evict":
                damage(chunk_path(folder / "chunks", keys[index]), how)

    def close(self) -> None:
        self.shut()
        self._alone.close()
        self._exit.close()


def damage(path: Path, how: str) -> None:
    """Delete, truncate, or flip one bit of a file, if it is there."""
    if not path.exists():
        return
    raw = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        raw[-len(raw) // 3] ^= 0x10
        path.write_bytes(raw)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other take 20 times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes")


@pytest.fixture(scope="module")
def world(
    probes: Path, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> Iterator[Callable[..., World]]:
    """``world(kind, dtype, chunk=16, cuts="shape-independent", rows=0)``, once each."""
    with worlds(probes, make_tiny_model, tiny_tokenizer) as get:
        yield get


@contextmanager
def worlds(
    probes: Path,
    make_tiny_model: Callable[..., Any],
    tokenizer: Any,
    device: str = "cpu",
) -> Iterator[Callable[..., World]]:
    """Worlds on one device; see ``world``."""
    made: dict[tuple[Any, ...], World] = {}

    def get(
        kind: str,
        dtype: str,
        *,
        chunk: int = 16,
        cuts: str = "",
        rows: int = 0,
        overlap: Any = "auto",
    ) -> World:
        cuts = cuts or "shape-independent"
        name = (kind, dtype, chunk, cuts, rows, overlap)
        if name not in made:
            model = make_tiny_model(kind).to(getattr(torch, dtype)).to(device)
            config = EngineConfig(
                cache_dir=probes,
                chunk_tokens=chunk,
                exact=cuts != "free",
                resident_rows=rows,
                overlap=overlap,
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(setup, "_probe", _with_verdict(cuts))
                patch.setattr(probe, "read_verdict", lambda path: None)
                made[name] = World(model, tokenizer, config)
            assert made[name].runner.cuts.name == cuts
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation_module, "Sampler", Recorder)
        yield get
    for one in made.values():
        one.close()


def _with_verdict(cuts: str) -> Callable[..., probe.Verdict]:
    """The start-up probe; where the grid is wanted, it says that cuts leave a trace."""
    measure = setup._probe

    def probed(*arguments: Any) -> probe.Verdict:
        verdict = measure(*arguments)
        if cuts == "grid":
            return dataclasses.replace(verdict, shape_independent=False)
        return verdict

    return probed
