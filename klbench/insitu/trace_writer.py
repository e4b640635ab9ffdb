"""Writes `klbench.trace/1`: append-only safetensors shards of one rank, each whole or not there.

    rank0-000001.safetensors   columns of what was added since the shard before; new names in its metadata
    rank0.json                 written last: {"schema", "backend", "rank", "nonce", "shards", "complete", ...}

Columns are integers of the smallest type that holds them, or, where that is smaller, `<column>.steps`:
[2, runs] of a difference to the number before and how often it comes in a row. A digest is two int64, its
halves. Indices count from the rank's first entry, over all shards. Forwards that are alike share a *layout*,
the list of their tensors, and carry only their digests (`packed`, `list`, `layout`: klbench/engine/packed.py
unfolds them). A folder without `rank0.json` is a trace that was cut. `klbench/engine/traces.py` reads it.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from safetensors.torch import save_file

from .plugin import write_json_atomically

SCHEMA = "klbench.trace/1"
ARMS = {"warming": 0, "generation": 1, "scoring": 2}
PHASES = {"extend": 0, "chunk": 1, "restored": 2, "decode": 3, "resumed": 4}
IN, OUT = 0, 1

_SHARD_DIGESTS = 1 << 20
"""Digests after which a shard is written: about 32 MB."""

_COLUMNS = {
    "forward": ("number", "rows", "requests"),
    "row": ("forward", "arm", "request", "position", "in_batch", "phase", "token"),
    "tensor": (
        *("forward", "operator", "direction", "argument", "dtype"),
        *("row_bytes", "event", "rows", "start"),
    ),
}

_OPTIONAL_COLUMNS = {
    "read": ("row", "operator", "argument", "low", "high"),
    "slot": ("kind", "forward", "operator", "argument", "event", "request", "position", "pool"),
    "unseen": ("number", "pool", "windowed"),
    "head": ("row", "rows"),
    "packed": ("forward", "layout", "first_row", "rows"),
    "list": ("packed", "group", "row"),
    "layout": (
        *("number", "operator", "direction", "argument", "dtype"),
        *("row_bytes", "event", "group", "piece"),
    ),
}
"""Tables that a shard has only where there is something in them; read, slot and packed come with digests."""

_INTEGERS = (torch.int8, torch.int16, torch.int32)


def _narrowed(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in the smallest type that holds them all."""
    if not values.numel():
        return values.to(torch.int8)
    low, high = int(values.min()), int(values.max())
    for dtype in _INTEGERS:
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return values.to(dtype)
    return values


def _stored(name: str, values: torch.Tensor) -> Tuple[str, torch.Tensor]:
    """A column as it is stored: its name there, and its numbers or its steps."""
    plain = _narrowed(values)
    if len(values) > 8:
        steps = torch.diff(values, prepend=torch.zeros(1, dtype=torch.int64))
        step, count = torch.unique_consecutive(steps, return_counts=True)
        runs = _narrowed(torch.stack([step, count]))
        if runs.numel() * runs.element_size() < plain.numel() * plain.element_size():
            return f"{name}.steps", runs
    return name, plain


class _Names:
    """Numbers names in the order they come, and keeps those that no shard holds yet."""

    def __init__(self) -> None:
        self._numbers: Dict[Any, int] = {}
        self.unwritten: List[Any] = []

    def number(self, key: Any, entry: Any) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._numbers)
            self.unwritten.append(entry)
        return found


class TraceWriter:
    """One rank's trace. Not safe for use from several threads."""

    def __init__(self, folder: Path, rank: int, nonce: str, backend: str) -> None:
        self._folder = folder
        self._rank = rank
        self._head = {"schema": SCHEMA, "backend": backend, "rank": rank, "nonce": nonce}
        self._names = {name: _Names() for name in ("operators", "arguments", "dtypes")}
        self._counts = dict.fromkeys(_COLUMNS, 0)
        self._pending: Dict[str, List[List[int]]] = {table: [] for table in _COLUMNS}
        self._digests: List[torch.Tensor] = []
        self._digest_rows: List[torch.Tensor] = []
        self._digest_count = 0
        self._unwritten_digests = 0
        self._bulk: Dict[str, List[torch.Tensor]] = {table: [] for table in _OPTIONAL_COLUMNS}
        self._bulk_digests: Dict[str, List[torch.Tensor]] = {}
        self._layouts: Dict[Tuple[Tuple[int, ...], ...], int] = {}
        self._packed = 0
        self._shards = 0
        self.written_bytes = 0

    def operator(
        self, module: str, call: int, class_name: str, state: Optional[str], window: Optional[int]
    ) -> int:
        """The number of a call site; `window` is how many earlier positions its state reaches back."""
        entry = {
            "module": module,
            "call": call,
            "class_name": class_name,
            "state": state,
            "window": window,
        }
        return self._names["operators"].number((module, call), entry)

    def argument(self, name: str) -> int:
        return self._names["arguments"].number(name, name)

    def dtype(self, name: str) -> int:
        return self._names["dtypes"].number(name, name)

    def add_forward(self, number: int, rows: int, requests: int) -> int:
        return self._add("forward", [number, rows, requests])

    def add_row(
        self, forward: int, arm: str, request: int, position: int, in_batch: int, phase: str, token: int
    ) -> int:
        return self._add("row", [forward, ARMS[arm], request, position, in_batch, PHASES[phase], token])

    def add_tensor(
        self,
        forward: int,
        operator: int,
        direction: int,
        argument: int,
        dtype: int,
        row_bytes: int,
        event: int,
        rows: Sequence[int],
        digests: torch.Tensor,
    ) -> None:
        """Adds one argument of one call; `rows` are row numbers (-1: a whole tensor), one per digest."""
        values = [forward, operator, direction, argument, dtype, row_bytes, event, len(rows)]
        self._add("tensor", [*values, self._digest_count])
        self._digests.append(digests.cpu())
        self._digest_rows.append(torch.tensor(list(rows), dtype=torch.int64))
        self._digest_count += len(rows)
        self._unwritten_digests += len(rows)
        if self._unwritten_digests >= _SHARD_DIGESTS:
            self.flush()

    def add_packed(
        self,
        forward: int,
        layout: Tuple[Tuple[int, ...], ...],
        first_row: int,
        rows: int,
        lists: Sequence[Sequence[int]],
        digests: torch.Tensor,
    ) -> None:
        """Adds all tensors of a forward at once.

        Each entry of `layout` is (operator, direction, argument, dtype, row bytes, event, group, piece).
        Group 0 is a whole tensor, group 1 the forward's rows from `first_row` on, group g the row numbers in
        `lists[g - 2]`. `digests` are those of the pieces, one after the other in the order of their numbers,
        each with as many as its group has rows.
        """
        number = self._layouts.get(layout)
        if number is None:
            number = self._layouts[layout] = len(self._layouts)
            entries = torch.tensor(layout, dtype=torch.int64).reshape(-1, 8)
            first = torch.full((len(entries), 1), number, dtype=torch.int64)
            self.add_columns("layout", torch.cat([first, entries], dim=1))
        for group, members in enumerate(lists, start=2):
            values = [[self._packed, group, row] for row in members]
            self.add_columns("list", torch.tensor(values, dtype=torch.int64).reshape(-1, 3))
        self.add_columns("packed", torch.tensor([[forward, number, first_row, rows]]), digests)
        self._packed += 1
        if self._unwritten_digests >= _SHARD_DIGESTS:
            self.flush()

    def add_columns(self, table: str, values: torch.Tensor, digests: Optional[torch.Tensor] = None) -> None:
        """Adds rows [n, columns] to an optional table, with their digests where it has some."""
        self._bulk[table].append(values)
        if digests is not None:
            self._bulk_digests.setdefault(table, []).append(digests)
            self._unwritten_digests += len(digests)

    def _add(self, table: str, values: List[int]) -> int:
        self._pending[table].append(values)
        self._counts[table] += 1
        return self._counts[table] - 1

    def flush(self) -> None:
        """Writes what no shard holds yet."""
        tensors: Dict[str, torch.Tensor] = {}
        for table, columns in _COLUMNS.items():
            values = torch.tensor(self._pending[table], dtype=torch.int64).reshape(-1, len(columns))
            for index, column in enumerate(columns):
                name, stored = _stored(f"{table}_{column}", values[:, index].contiguous())
                tensors[name] = stored
            self._pending[table] = []
        for table, columns in _OPTIONAL_COLUMNS.items():
            if self._bulk[table]:
                values = torch.cat(self._bulk[table])
                for index, column in enumerate(columns):
                    name, stored = _stored(f"{table}_{column}", values[:, index].contiguous())
                    tensors[name] = stored
                self._bulk[table] = []
            if self._bulk_digests.get(table):
                tensors[f"{table}_digest"] = torch.cat(self._bulk_digests.pop(table))
        empty = torch.empty(0, dtype=torch.int64)
        name, stored = _stored("tensor_row", torch.cat([*self._digest_rows, empty]))
        tensors[name] = stored
        tensors["digest"] = torch.cat([*self._digests, empty.reshape(0, 2)])
        self._digests, self._digest_rows, self._unwritten_digests = [], [], 0
        metadata = {"schema": SCHEMA}
        for name, names in self._names.items():
            metadata[name] = json.dumps(names.unwritten)
            names.unwritten = []
        self._shards += 1
        path = self._folder / f"rank{self._rank}-{self._shards:06d}.safetensors"
        draft = path.with_name(f".{path.name}.draft")
        save_file(tensors, str(draft), metadata=metadata)
        self.written_bytes += draft.stat().st_size
        os.replace(str(draft), str(path))

    def close(
        self,
        observes_state: bool,
        observes_head: bool,
        invalid: Optional[str],
        not_observed: Sequence[str] = (),
    ) -> None:
        """Writes the last shard and the file that says the trace is complete."""
        self.flush()
        content: Dict[str, Any] = dict(self._head)
        content.update(
            shards=self._shards,
            complete=True,
            observes_state=observes_state,
            observes_head=observes_head,
            invalid=invalid,
            not_observed=list(not_observed),
        )
        write_json_atomically(self._folder / f"rank{self._rank}.json", content)
