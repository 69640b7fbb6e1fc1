"""A GGUF file with its weights unpacked to float32, for llama.cpp without quantization.

Our engine, transformers and vLLM run the packaged model's weights unpacked; this gives
llama.cpp the same numbers. Metadata and the order of tensors stay as they are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_ALL_F32 = 0  # general.file_type of llama.cpp
_OWN = ("GGUF.", "general.architecture", "general.file_type")  # written by the writer


def unpacked(source: Path, folder: Path) -> Path:
    """The float32 file of ``source`` in ``folder``; written on first use.

    Raises:
        SystemExit: If the library ``gguf`` is not installed.
    """
    target = folder / f"{source.stem}.F32.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    _unpack(source, part)
    part.replace(target)
    return target


def _unpack(source: Path, target: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise SystemExit('unpacking GGUF needs: pip install "pcr-rag[gguf]"') from error
    reader: Any = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(_ALL_F32)
    for name, field in reader.fields.items():
        if not name.startswith(_OWN):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
