"""Safetensors as raw bytes: tensors of every dtype taken over from file to file, without torch.

numpy has no bfloat16 and no float8; nothing here looks at a value. Headers come from files that a server
wrote and are checked before they are believed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from klbench.errors import UndecidedError
from klbench.storage import read_small

_MAX_HEADER_BYTES = 16 << 20
_MAX_FILE_BYTES = 2 << 30
"""Rows of a few operators, and what a replay may keep (64 MiB a rank)."""
TAGS = {
    # torch's name: safetensors' name and bytes an element
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_BYTES = dict(TAGS.values())


@dataclass(frozen=True, slots=True)
class RawTensor:
    """`dtype` is safetensors' name of it."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def row_tensor(dtype: str, content: bytes) -> RawTensor:
    """A row's bytes as a vector of torch's `dtype`. Raises UndecidedError for a dtype that is not known."""
    tag, size = TAGS.get(dtype, ("", 1))
    if not tag or len(content) % size:
        raise UndecidedError(f"a row of {len(content)} bytes cannot be {dtype}")
    return RawTensor(tag, (len(content) // size,), content)


def read_raw(path: Path, most_bytes: int = _MAX_FILE_BYTES) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """All tensors of a safetensors file and its metadata. Raises UndecidedError for a damaged one, and for
    what is no regular file or larger than `most_bytes` (2 GiB)."""
    try:
        content = read_small(path, most_bytes)
        (length,) = struct.unpack("<Q", content[:8])
        if length > min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(content[8 : 8 + length])
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        data = memoryview(content)[8 + length :]
        return {name: _tensor(entry, data) for name, entry in header.items()}, metadata
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UndecidedError(f"{path} cannot be read", why=str(error)) from error


def _tensor(entry: Mapping[str, object], data: memoryview) -> RawTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError("a tensor has no shape or no place")
    first, end = (int(offset) for offset in offsets)
    sizes = tuple(int(size) for size in shape)
    dtype = str(entry["dtype"])
    if not 0 <= first <= end <= len(data) or min(sizes, default=0) < 0:
        raise ValueError("a tensor lies outside the file")
    if end - first != prod(sizes) * _BYTES[dtype]:
        raise ValueError("a tensor has more or fewer bytes than its shape")
    return RawTensor(dtype, sizes, bytes(data[first:end]))


def write_raw(
    path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the tensors as a safetensors file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in tensors.items():
        end = place + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.content)
