"""Reads a folder of `klbench.trace/1` into `core.trace.Trace`: bounded, checked, and never unpickled.

A shard is safetensors: integers and names, no code. Whatever is missing, cut, too large or points outside its
table is a KlbenchError that names the file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from klbench.core.trace import SCHEMA, Ints, Operator, Slot, Trace
from klbench.engine import packed
from klbench.errors import KlbenchError

_SHARD = re.compile(r"rank([0-9]{1,6})-([0-9]{6})\.safetensors")
_RANK_FILE = re.compile(r"rank([0-9]{1,6})\.json")
_MAX_BYTES = 8 << 30
_MAX_JSON_BYTES = 16 << 20
_MAX_COLUMN = 1 << 25

_ROW_COLUMNS = ("forward", "arm", "request", "position", "in_batch", "phase", "token")
_TENSOR_COLUMNS = (
    "forward",
    "operator",
    "direction",
    "argument",
    "dtype",
    "row_bytes",
    "event",
    "rows",
    "start",
)
_COLUMNS = (
    *(f"forward_{name}" for name in ("number", "rows", "requests")),
    *(f"row_{name}" for name in _ROW_COLUMNS),
    *(f"tensor_{name}" for name in _TENSOR_COLUMNS),
    "tensor_row",
)
_READ_COLUMNS = tuple(f"read_{name}" for name in ("row", "operator", "argument", "low", "high"))
_SLOT_COLUMNS = tuple(
    f"slot_{name}"
    for name in ("kind", "forward", "operator", "argument", "event", "request", "position", "pool")
)
_HEAD_COLUMNS = ("head_row", "head_rows")
_UNSEEN_COLUMNS = tuple(f"unseen_{name}" for name in ("number", "pool", "windowed"))
_OPTIONAL = (*_READ_COLUMNS, *_SLOT_COLUMNS, *_HEAD_COLUMNS, *_UNSEEN_COLUMNS, *packed.COLUMNS)
_TABLES = (*_COLUMNS, *_READ_COLUMNS, *_SLOT_COLUMNS, *_HEAD_COLUMNS, *_UNSEEN_COLUMNS)
"""Columns that `core.trace` knows."""
_DIGESTS = ("digest", "read_digest", "slot_digest", "packed_digest")
_INTEGERS = (np.int8, np.int16, np.int32, np.int64)
_WRITTEN_AND_READ = 2
"""A slot that was written and read in one call: one line in the file, two in memory."""


class _RankFile(msgspec.Struct):
    schema: str
    backend: str
    rank: int
    nonce: str
    shards: int
    complete: bool
    observes_state: bool
    observes_head: bool
    invalid: str | None


class _OperatorEntry(msgspec.Struct, frozen=True):
    module: str
    call: int
    class_name: str
    state: str | None
    window: int | None


def _refuse(path: Path, why: str) -> KlbenchError:
    return KlbenchError(
        f"the trace file {path} cannot be used",
        why=why,
        next="capture again; the server and the run are fine",
    )


def _read_json(path: Path, kind: type[Any]) -> Any:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise _refuse(path, "it is larger than any that klbench writes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(path, str(error)) from error


def _unrolled(path: Path, name: str, runs: npt.NDArray[Any]) -> Ints:
    """The column whose steps these are: [2, runs] of a difference and how often it comes in a row."""
    if runs.dtype not in _INTEGERS or runs.ndim != 2 or runs.shape[0] != 2:
        raise _refuse(path, f"the steps of its column {name} are {runs.dtype}{list(runs.shape)}")
    step, count = runs.astype(np.int64)
    if len(count) and (count.min() < 1 or count.max() > _MAX_COLUMN or count.sum() > _MAX_COLUMN):
        raise _refuse(path, f"its column {name} is longer than any that klbench writes")
    result: Ints = np.cumsum(np.repeat(step, count))
    return result


class _Rank:
    """The concatenated shards of one rank."""

    def __init__(self, number: int, about: _RankFile | None) -> None:
        self.number = number
        self.about = about
        self.columns: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in (*_COLUMNS, *_OPTIONAL)}
        self.digests: dict[str, list[npt.NDArray[np.uint64]]] = {name: [] for name in _DIGESTS}
        self.operators: list[_OperatorEntry] = []
        self.arguments: list[str] = []
        self.dtypes: list[str] = []

    def add_shard(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("schema") != SCHEMA:
                    raise _refuse(path, f"its schema is {metadata.get('schema')!r}, not {SCHEMA!r}")
                names = set(file.keys())
                for name in (*_COLUMNS, *_OPTIONAL, *_DIGESTS):
                    if name in names:
                        self._add_column(path, name, file.get_tensor(name))
                    elif f"{name}.steps" in names:
                        self._add_column(path, name, _unrolled(path, name, file.get_tensor(f"{name}.steps")))
                    elif name in _COLUMNS or name == "digest":
                        raise _refuse(path, f"its column {name} is missing")
            self.operators += msgspec.json.decode(metadata.get("operators", ""), type=list[_OperatorEntry])
            self.arguments += msgspec.json.decode(metadata.get("arguments", ""), type=list[str])
            self.dtypes += msgspec.json.decode(metadata.get("dtypes", ""), type=list[str])
        except (
            OSError,
            SafetensorError,
            msgspec.MsgspecError,
            RecursionError,
            ValueError,
            TypeError,
        ) as error:
            raise _refuse(path, str(error)) from error

    def _add_column(self, path: Path, name: str, values: npt.NDArray[Any]) -> None:
        width = 2 if name in _DIGESTS else 1
        known = values.dtype == np.int64 if width == 2 else values.dtype in _INTEGERS
        if not known or values.ndim != width or (width == 2 and values.shape[1] != 2):
            raise _refuse(path, f"its column {name} is {values.dtype}{list(values.shape)}")
        if name in _DIGESTS:
            self.digests[name].append(values.view(np.uint64))
        else:
            self.columns[name].append(values.astype(np.int64, copy=False))

    def unfold(self, where: Path) -> None:
        """Turns what the file stores once into the tables of `core.trace`."""
        if self.columns["packed_forward"]:
            columns = {name: self.joined(name) for name in (*packed.COLUMNS, "row_forward")}
            try:
                found = packed.unfold(columns, self.joined_digests("packed_digest"))
            except packed.BadPacking as error:
                raise _refuse(where, str(error)) from error
            before = len(self.joined("tensor_row"))
            for name, values in found.columns.items():
                self.columns[name].append(values + before if name == "tensor_start" else values)
            self.digests["digest"].append(found.digest)
        kinds = self.joined("slot_kind")
        both = np.flatnonzero(kinds == _WRITTEN_AND_READ)
        if len(both) and len(kinds) == len(self.joined_digests("slot_digest")):
            for name in _SLOT_COLUMNS:
                values = self.joined(name)
                self.columns[name] = [values, values[both]]
            kinds = kinds.copy()
            kinds[both] = Slot.WRITTEN
            self.columns["slot_kind"] = [kinds, np.full(len(both), Slot.READ, dtype=np.int64)]
            digests = self.joined_digests("slot_digest")
            self.digests["slot_digest"] = [digests, digests[both]]

    def joined(self, name: str) -> Ints:
        parts = self.columns[name]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def joined_digests(self, name: str) -> npt.NDArray[np.uint64]:
        parts = self.digests[name]
        return np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.uint64)


def read_trace(folder: Path) -> Trace:
    """The trace in `folder`, all ranks together. Raises KlbenchError for a folder that holds none."""
    shards: dict[int, dict[int, Path]] = {}
    size_bytes = 0
    try:
        for path in folder.iterdir():
            if found := _SHARD.fullmatch(path.name):
                shards.setdefault(int(found.group(1)), {})[int(found.group(2))] = path
                size_bytes += path.stat().st_size
            elif found := _RANK_FILE.fullmatch(path.name):
                shards.setdefault(int(found.group(1)), {})
    except OSError as error:
        raise _refuse(folder, str(error)) from error
    if not shards:
        raise _refuse(folder, "it holds no trace")
    if size_bytes > _MAX_BYTES:
        raise _refuse(folder, f"its {size_bytes} bytes are more than klbench reads ({_MAX_BYTES})")
    ranks = [_read_rank(folder, number, shards[number]) for number in sorted(shards)]
    return _join(folder, ranks)


def _read_rank(folder: Path, number: int, shards: dict[int, Path]) -> _Rank:
    rank_file = folder / f"rank{number}.json"
    about: _RankFile | None = _read_json(rank_file, _RankFile) if rank_file.exists() else None
    if about is not None and about.schema != SCHEMA:
        raise _refuse(rank_file, f"its schema is {about.schema!r}, not {SCHEMA!r}")
    wanted = about.shards if about is not None else len(shards)
    if sorted(shards) != list(range(1, wanted + 1)):
        raise _refuse(rank_file, f"of {wanted} shards there are numbers {sorted(shards)}")
    rank = _Rank(number, about)
    for shard in sorted(shards):
        rank.add_shard(shards[shard])
    rank.unfold(folder / f"rank{number}-*.safetensors")
    return rank


def _join(folder: Path, ranks: list[_Rank]) -> Trace:
    """One table of names and of each column, ranks end to end."""
    operator_numbers: dict[tuple[str, int], int] = {}
    operators: list[_OperatorEntry] = []
    arguments: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    joined: dict[str, list[Ints]] = {name: [] for name in (*_TABLES, "forward_rank", "unseen_rank")}
    digests: dict[str, list[npt.NDArray[np.uint64]]] = {name: [] for name in _DIGESTS}
    forwards = rows = digest_count = 0
    for rank in ranks:
        for entry in rank.operators:
            if (entry.module, entry.call) not in operator_numbers:
                operator_numbers[entry.module, entry.call] = len(operators)
                operators.append(entry)
        renumbered = {
            "operator": [operator_numbers[entry.module, entry.call] for entry in rank.operators],
            "argument": [arguments.setdefault(name, len(arguments)) for name in rank.arguments],
            "dtype": [dtypes.setdefault(name, len(dtypes)) for name in rank.dtypes],
        }
        columns = {name: rank.joined(name) for name in _TABLES}
        _check(folder, rank, columns)
        for name, values in columns.items():
            kind = name.split("_", 1)[1]
            if kind in renumbered:
                values = np.asarray(renumbered[kind], dtype=np.int64)[values]
            elif kind == "forward":
                values = values + forwards
            elif name in ("tensor_row", "read_row", "head_row"):
                values = np.where(values < 0, values, values + rows)
            elif name == "tensor_start":
                values = values + digest_count
            joined[name].append(values)
        for numbered in ("forward", "unseen"):
            own = np.full(len(columns[f"{numbered}_number"]), rank.number, dtype=np.int64)
            joined[f"{numbered}_rank"].append(own)
        for name in _DIGESTS:
            digests[name].append(rank.joined_digests(name))
        forwards += len(columns["forward_number"])
        rows += len(columns["row_forward"])
        digest_count += len(columns["tensor_row"])
    table = {name: np.concatenate(parts) for name, parts in joined.items()}
    abouts = [rank.about for rank in ranks]
    return Trace(
        backend=next((about.backend for about in abouts if about is not None), "unknown"),
        operators=_operators(operators),
        arguments=tuple(arguments),
        dtypes=tuple(dtypes),
        observes_state=all(about is not None and about.observes_state for about in abouts),
        observes_head=all(about is not None and about.observes_head for about in abouts),
        invalid=_invalid(ranks),
        digest=np.concatenate(digests["digest"]),
        read_digest=np.concatenate(digests["read_digest"]),
        slot_digest=np.concatenate(digests["slot_digest"]),
        **table,
    )


def _operators(entries: list[_OperatorEntry]) -> tuple[Operator, ...]:
    """The call sites; one is a container where another's path goes on from its own."""
    above: set[str] = set()
    for entry in entries:
        parts = entry.module.split(".") if entry.module else []
        above.update(".".join(parts[:length]) for length in range(len(parts)))
    return tuple(
        Operator(
            module=entry.module,
            class_name=entry.class_name,
            call=entry.call,
            order=order,
            container=entry.module in above,
            state=entry.state,
            window=entry.window,
        )
        for order, entry in enumerate(entries)
    )


def _invalid(ranks: list[_Rank]) -> str | None:
    for rank in ranks:
        if rank.about is None or not rank.about.complete:
            return f"the capture of rank {rank.number} was cut before it ended"
        if rank.about.invalid is not None:
            return rank.about.invalid
    return None


def _check(folder: Path, rank: _Rank, columns: dict[str, Ints]) -> None:
    """Every index lies in its table and every tensor's digests lie in the digest column."""
    where = folder / f"rank{rank.number}-*.safetensors"
    for prefix in ("forward", "row", "read", "slot", "head", "unseen"):
        lengths = {len(values) for name, values in columns.items() if name.startswith(prefix + "_")}
        if prefix in ("read", "slot"):
            lengths.add(len(rank.joined_digests(f"{prefix}_digest")))
        if len(lengths) != 1:
            raise _refuse(where, f"the columns of table {prefix} have different lengths")
    lengths = {len(columns[f"tensor_{name}"]) for name in _TENSOR_COLUMNS}
    total = len(columns["tensor_row"])
    if len(lengths) != 1 or total != len(rank.joined_digests("digest")):
        raise _refuse(where, "the columns of table tensor have different lengths")
    limits = {
        "forward": len(columns["forward_number"]),
        "operator": len(rank.operators),
        "argument": len(rank.arguments),
        "dtype": len(rank.dtypes),
        "direction": 2,
        "arm": 3,
        "phase": 5,
        "kind": 2,
    }
    for name, values in columns.items():
        limit = limits.get(name.split("_", 1)[1])
        if limit is not None and len(values) and (values.min() < 0 or values.max() >= limit):
            raise _refuse(where, f"the column {name} points outside its table")
    for name in ("tensor_row", "read_row", "head_row"):
        values = columns[name]
        if len(values) and (values.min() < -1 or values.max() >= len(columns["row_forward"])):
            raise _refuse(where, f"the column {name} points outside its table")
    ends = np.cumsum(columns["tensor_rows"])
    if total != (ends[-1] if len(ends) else 0) or (
        len(ends)
        and (
            columns["tensor_rows"].min() < 0
            or not np.array_equal(ends - columns["tensor_rows"], columns["tensor_start"])
        )
    ):
        raise _refuse(where, "its tensors do not lie end to end")


def read_rows(path: Path) -> dict[str, tuple[str, npt.NDArray[np.uint8]]]:
    """Raw rows that `dumps rows` fetched: the dtype and the bytes by key."""
    try:
        with safe_open(path, framework="numpy") as file:
            dtypes = json.loads((file.metadata() or {}).get("dtypes", "{}"))
            return {key: (str(dtypes[key]), file.get_tensor(key).view(np.uint8)) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refuse(path, str(error)) from error
