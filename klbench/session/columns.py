"""`HelperColumns` in a compressed npz file: written atomically, read without trust.

A file from elsewhere is data only: pickles are refused, names, types and shapes are checked, and its size is
bounded before it is unpacked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from klbench.core.columns import HELPERS, HelperColumns
from klbench.errors import UndecidedError
from klbench.session.folder import write_atomically
from klbench.storage import open_regular

FORMAT = 1
MAX_FILE_BYTES = 512 * 1024**2
"""Unpacked; 32 prompts of 100,000 tokens are 13 MB, a million generated tokens 12 MB."""

_TYPES: dict[str, type[np.generic]] = {
    "prompt_len": np.int64,
    "cached_generation": np.int64,
    "cached_scoring": np.int64,
    "output_len": np.int64,
    "dropped": np.bool_,
    "start": np.int64,
    "token_id": np.int32,
    "decode_nats": np.float32,
    "prefill_nats": np.float32,
    "prompt_start": np.int64,
    "prompt_ids": np.int32,
    "lost": np.bool_,
}
_LATER = ("lost",)
"""Columns that files of older versions do not have."""
assert {"helper", *_TYPES} == {field.name for field in dataclasses.fields(HelperColumns)}

# What numpy and zipfile raise on damaged files; MemoryError where a header claims a shape that is not there.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


_ONE_AT_A_TIME = threading.Lock()


def read_arrays(file: Path, names: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """The named arrays of an npz file, and the optional ones that it has. Raises one of UNREADABLE for what
    is no regular file, for one that would unpack to too much, and where an array is missing."""
    with open_regular(file) as source, opened_arrays(source) as arrays:
        there = [name for name in optional if name in arrays.files]
        return {name: arrays[name] for name in (*names, *there)}


@contextlib.contextmanager
def opened_arrays(file: IO[bytes]) -> Iterator[Any]:
    """An npz file as numpy opens it, without pickles; one thread at a time. Raises one of UNREADABLE, also
    for a file that would unpack to more than MAX_FILE_BYTES.

    Each header is parsed by `ast.literal_eval`, which before Python 3.11.8 fails now and then with a
    SystemError where two threads are in it (python/cpython#106905).
    """
    with zipfile.ZipFile(file) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > MAX_FILE_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_FILE_BYTES} bytes")
    file.seek(0)
    with _ONE_AT_A_TIME, np.load(file, allow_pickle=False) as archive:
        yield archive


def save_columns(file: Path, columns: HelperColumns) -> None:
    """Writes the columns; a reader sees all or nothing."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: getattr(columns, name) for name in _TYPES}
    np.savez_compressed(buffer, format=np.int64(FORMAT), helper=np.array(columns.helper), **arrays)
    write_atomically(file, buffer.getvalue())


def load_columns(file: Path) -> HelperColumns:
    """Reads the columns. Raises UndecidedError naming the file when it is not one of ours or is damaged."""
    try:
        return _load(file)
    except UNREADABLE as error:
        raise UndecidedError(
            f"cannot read the columns {file}",
            why=str(error),
            next="measure again: the rest of the session is not affected",
        ) from error


def without_prompts(content: bytes) -> bytes | None:
    """The columns with the prompts taken out and each token id replaced by -1; None for other files."""
    try:
        with opened_arrays(io.BytesIO(content)) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if "prefill_nats" not in arrays:
            return None
        arrays["prompt_start"] = np.zeros_like(arrays["prompt_start"])
        arrays["prompt_ids"] = arrays["prompt_ids"][:0]
        arrays["token_id"] = np.full_like(arrays["token_id"], -1)
    except UNREADABLE:
        return None
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _load(file: Path) -> HelperColumns:
    arrays = read_arrays(file, ("format", "helper", *(_TYPES.keys() - _LATER)), _LATER)
    form, helper = int(arrays.pop("format")), str(arrays.pop("helper"))
    if form != FORMAT:
        raise ValueError(f"format {form}; this klbench reads {FORMAT}")
    if helper not in HELPERS:
        raise ValueError(f"{helper!r} is no helper")
    for name, values in arrays.items():
        if values.ndim != 1 or values.dtype != _TYPES[name]:
            raise ValueError(f"column {name} is {values.dtype} with {values.ndim} dimensions")
    if "lost" in arrays and len(arrays["lost"]) != len(arrays["prompt_len"]):
        raise ValueError("column lost is of other requests")
    columns = HelperColumns(helper=helper, **arrays)
    _check(columns)
    return columns


def _check(columns: HelperColumns) -> None:
    requests, tokens = columns.requests, len(columns.token_id)
    for name in ("cached_generation", "cached_scoring", "output_len", "dropped"):
        if len(getattr(columns, name)) != requests:
            raise ValueError(f"column {name} has {len(getattr(columns, name))} of {requests} requests")
    for name in ("decode_nats", "prefill_nats"):
        if len(getattr(columns, name)) != tokens:
            raise ValueError(f"column {name} has {len(getattr(columns, name))} of {tokens} tokens")
    for name, end in (("start", tokens), ("prompt_start", len(columns.prompt_ids))):
        edges = getattr(columns, name)
        whole = len(edges) == requests + 1 and edges[0] == 0 and edges[-1] == end
        if not whole or bool((np.diff(edges) < 0).any()):
            raise ValueError(f"column {name} does not divide its {end} values among {requests} requests")
    if bool((np.diff(columns.start)[columns.lost] == 0).any()) or not bool(
        np.isnan(columns.decode_nats[~columns.compared]).all()
    ):
        raise ValueError("column lost names requests whose first logprob is there")
