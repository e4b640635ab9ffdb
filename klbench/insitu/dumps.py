"""Turns the stock dumper's files into `klbench.trace/1`, and fetches raw rows out of them.

A short process of the server's Python:

    python -m klbench_insitu.dumps convert DUMP_DIR OUT_DIR     prints {"done": 3, "total": 40} lines,
                                                                then {"result": {...}}
    python -m klbench_insitu.dumps rows DUMP_DIR OUT_FILE       reads wanted rows as JSON from stdin
    python -m klbench_insitu.dumps serve        both, for each JSON line on stdin until it ends:
                                                {"do": "convert", "dump_dir", "out_dir"},
                                                {"do": "rows", "dump_dir", "wanted", "out_file"}

DUMP_DIR is what capture.py filled, or a server's own dumper (stock_dumps.py). Files are read with
`weights_only=True` and never otherwise: one that would run code makes the trace invalid. Only rows of armed
requests are digested; a first dimension that is a multiple of the forward's rows is folded to rows (heads of
a q_norm), all else is digested whole.
"""

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from safetensors.torch import save_file

from .digest import as_lanes, digest_rows
from .direct_calls import never_called
from .dump_files import (
    Argument,
    BadDump,
    DumpedForward,
    DumpedTensor,
    Folds,
    Name,
    dumped_files,
    dumped_forwards,
    dumped_tensors,
    load,
)
from .stock_dumps import regroup
from .trace_writer import IN, OUT, TraceWriter


class _Calls:
    """Counts calls of a module within one forward and numbers events: a call's inputs, a return's outputs."""

    def __init__(self) -> None:
        self._current: Dict[str, Tuple[int, int]] = {}
        self._seen: Dict[Tuple[str, int], Set[Tuple[int, str]]] = {}
        self._latest: Optional[Tuple[str, int, int]] = None
        self.event = -1

    def call_of(self, name: Name) -> int:
        """The call that this tensor belongs to; a tensor seen before begins a new one."""
        call, direction = self._current.get(name.module, (0, IN))
        key = (name.direction, name.argument)
        if (name.direction == IN and direction == OUT) or key in self._seen.get((name.module, call), set()):
            call += 1
        self._current[name.module] = (call, name.direction)
        self._seen.setdefault((name.module, call), set()).add(key)
        if self._latest != (name.module, call, name.direction):
            self._latest = (name.module, call, name.direction)
            self.event += 1
        return call


class Converter:
    """Writes the forwards of one rank into a trace."""

    def __init__(self, writer: TraceWriter, modules: Dict[str, Any]) -> None:
        self._writer = writer
        self._modules = modules
        self._called: Set[str] = set()
        self._folds = Folds()
        self.files = 0

    def add(self, dumped: DumpedForward) -> None:
        about = dumped.about
        forward = self._writer.add_forward(dumped.number, about["rows"], len(about["requests"]))
        calls = _Calls()
        core: Dict[str, torch.Tensor] = {}
        rows: Optional[List[int]] = None
        in_batch: List[int] = []
        files = 0
        waiting: List[DumpedTensor] = []
        for item in dumped_tensors(dumped.folder):
            files += 1
            if item.name is None:
                if item.layer_id is None and isinstance(item.value, torch.Tensor):
                    core.setdefault(item.core, item.value)
                if rows is None and {"input_ids", "positions"} <= core.keys():
                    rows, in_batch = self._add_rows(dumped, forward, core)
                    for earlier in waiting:
                        self._add_tensor(forward, earlier, calls, rows, in_batch, len(core["input_ids"]))
            elif isinstance(item.value, torch.Tensor):
                if rows is None:
                    waiting.append(item)
                else:
                    self._add_tensor(forward, item, calls, rows, in_batch, len(core["input_ids"]))
        if rows is None:
            raise BadDump(f"{dumped.folder.name} has no token ids and positions")
        if files != about["expected_files"]:
            raise BadDump(f"{dumped.folder.name} holds {files} of {about['expected_files']} files")
        self.files += files

    def _add_rows(
        self, dumped: DumpedForward, forward: int, core: Dict[str, torch.Tensor]
    ) -> Tuple[List[int], List[int]]:
        """Adds the rows of the armed requests; their numbers, and where they lie in the batch."""
        tokens, positions = core["input_ids"].tolist(), core["positions"].tolist()
        numbers, in_batch = [], []
        for rid, first, count, phase, start in dumped.armed_parts():
            if positions[start : start + count] != list(range(first, first + count)):
                raise BadDump(f"{dumped.folder.name}: the rows of request {rid.request} are elsewhere")
            for row in range(start, start + count):
                position, token = positions[row], tokens[row]
                number = self._writer.add_row(forward, rid.arm, rid.request, position, row, phase, token)
                numbers.append(number)
                in_batch.append(row)
        return numbers, in_batch

    def _add_tensor(
        self,
        forward: int,
        item: DumpedTensor,
        calls: _Calls,
        rows: List[int],
        in_batch: List[int],
        batch_rows: int,
    ) -> None:
        name = item.name
        assert name is not None
        about = self._modules.get(name.module, {})
        self._called.add(name.module)
        call = calls.call_of(name)
        operator = self._writer.operator(
            name.module, call, str(about.get("class", "")), about.get("state"), about.get("window")
        )
        argument = (name.module, call, name.direction, name.argument)
        by_row = self._folds.folded(argument, item.value, batch_rows)
        chosen = item.value if by_row is None else by_row[in_batch]
        count = 1 if by_row is None else len(in_batch)
        self._writer.add_tensor(
            forward=forward,
            operator=operator,
            direction=name.direction,
            argument=self._writer.argument(name.argument),
            dtype=self._writer.dtype(str(item.value.dtype).replace("torch.", "")),
            row_bytes=chosen.numel() * chosen.element_size() // max(count, 1),
            event=calls.event,
            rows=[-1] if by_row is None else rows,
            digests=digest_rows(chosen, count),
        )

    def add_missed(self) -> List[str]:
        """Adds operators with state that ran past the dumper's hooks, without anything of theirs; says so."""
        missed = never_called(self._modules, self._called)
        for path in missed:
            about = self._modules[path]
            self._writer.operator(path, 0, about["class"], about["state"], about["window"])
        return [f"{path}: it was not called as a module" for path in missed]


def _modules(dump_dir: Path, rank: int) -> Dict[str, Any]:
    try:
        content = json.loads((dump_dir / f"modules-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def convert(dump_dir: Path, out_dir: Path) -> Dict[str, Any]:
    """Converts all ranks of `dump_dir`; a dump that cannot be trusted makes its rank's trace invalid."""
    out_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    regroup(dump_dir)
    forwards = dumped_forwards(dump_dir)
    result: Dict[str, Any] = {"forwards": len(forwards), "files": 0, "dump_bytes": 0, "trace_bytes": 0}
    done = 0
    for rank in sorted({forward.rank for forward in forwards}):
        own = [forward for forward in forwards if forward.rank == rank]
        writer = TraceWriter(out_dir, rank, own[0].about["nonce"], "dumper")
        converter = Converter(writer, _modules(dump_dir, rank))
        invalid = _invalid(dump_dir, rank)
        for forward in own:
            try:
                converter.add(forward)
            except BadDump as error:
                invalid = invalid or str(error)
            done += 1
            result["dump_bytes"] += forward.about["bytes"]
            print(json.dumps({"done": done, "total": len(forwards)}), flush=True)
        missed = converter.add_missed()
        writer.close(observes_state=False, observes_head=False, invalid=invalid, not_observed=missed)
        result["files"] += converter.files
        result["trace_bytes"] += writer.written_bytes
    return result


def _invalid(dump_dir: Path, rank: int) -> Optional[str]:
    try:
        return str(json.loads((dump_dir / f"invalid-{rank}.json").read_text(encoding="utf-8"))["what"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"invalid-{rank}.json cannot be read: {error}"


def fetch_rows(dump_dir: Path, wanted: List[Dict[str, Any]], out_file: Path) -> int:
    """Writes the raw bytes of the wanted rows; returns how many were found.

    Each wanted row is {"key", "rank", "forward", "module", "call", "direction", "argument", "row_in_batch"}.
    The file has under each key uint8 [row bytes], and in its metadata the dtypes by key.
    """
    by_forward: Dict[Tuple[int, int], Dict[Argument, List[Dict[str, Any]]]] = {}
    for want in wanted:
        tensors = by_forward.setdefault((int(want["rank"]), int(want["forward"])), {})
        key = (str(want["module"]), int(want["call"]), int(want["direction"]), str(want["argument"]))
        tensors.setdefault(key, []).append(want)
    found: Dict[str, torch.Tensor] = {}
    dtypes: Dict[str, str] = {}
    whose: Dict[str, Tuple[Folds, Argument]] = {}
    folds: Dict[int, Folds] = {}
    for dumped in dumped_forwards(dump_dir):
        tensors = by_forward.get((dumped.rank, dumped.number), {})
        if not tensors:
            continue
        calls = _Calls()
        batch_rows = 0
        for file in dumped_files(dumped.folder):
            name = file.name
            if name is None:
                if file.text == "input_ids" and file.layer_id is None and not batch_rows:
                    batch_rows = len(load(file.path)["value"])
                continue
            call = calls.call_of(name)
            argument = (name.module, call, name.direction, name.argument)
            chosen = tensors.get(argument, ())
            value = load(file.path)["value"] if chosen else None
            if not isinstance(value, torch.Tensor):
                continue
            own = folds.setdefault(dumped.rank, Folds())
            by_row = own.folded(argument, value, batch_rows)
            for want in chosen:
                if by_row is None or not 0 <= int(want["row_in_batch"]) < batch_rows:
                    continue
                lanes, row_bytes = as_lanes(by_row[int(want["row_in_batch"])], 1)
                found[str(want["key"])] = lanes.view(torch.uint8)[0, :row_bytes].clone()
                dtypes[str(want["key"])] = str(value.dtype).replace("torch.", "")
                whose[str(want["key"])] = (own, argument)
    # Where a later forward showed that the tensor has no rows, what an earlier one folded was none.
    for wrong in [row for row, (own, its) in whose.items() if its in own.without_rows]:
        del found[wrong], dtypes[wrong]
    save_file(found, str(out_file), metadata={"dtypes": json.dumps(dtypes)})
    return len(found)


def _serve() -> None:
    """Answers one line after the other; torch is loaded once for all of them."""
    for line in sys.stdin:
        asked = json.loads(line)
        dump_dir = Path(asked["dump_dir"])
        if asked["do"] == "convert":
            result = convert(dump_dir, Path(asked["out_dir"]))
        else:
            result = {"rows": fetch_rows(dump_dir, asked["wanted"], Path(asked["out_file"]))}
        print(json.dumps({"result": result}), flush=True)


def main(arguments: List[str]) -> int:
    torch.set_num_threads(1)
    if arguments == ["serve"]:
        _serve()
        return 0
    if len(arguments) == 3 and arguments[0] == "convert":
        result: Dict[str, Any] = convert(Path(arguments[1]), Path(arguments[2]))
    elif len(arguments) == 3 and arguments[0] == "rows":
        result = {"rows": fetch_rows(Path(arguments[1]), json.load(sys.stdin), Path(arguments[2]))}
    else:
        print(__doc__, file=sys.stderr)
        return 2
    print(json.dumps({"result": result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
