"""Gives what a server's own dumper wrote the form that capture.py makes: a folder for each forward.

Without our plugin the dumper is switched from outside (`/dumper/configure`) and writes every forward of every
request into one folder, named by step and rank. klbench leaves `stock.json` beside it:

    {"nonce": "a1b2", "exp_names": ["klb-a1b2-7"], "windows": {"2": 64}}

Which rows belong to which request is read from the forward's own core fields: ids, positions, lengths. What
state a module reads is told by its name and its inputs, for its class is not in a dump: a leaf that is named
like an attention and takes several tensors, or like a convolution or a recurrence. A layer in which none
can be told makes the trace invalid, for an attention taken for a stateless operator would be blamed wrongly.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from .composition import RequestHistory
from .dump_files import BadDump, DumpedFile, dumped_files, load
from .plugin import write_json_atomically
from .rids import parse_rid
from .trace_writer import IN

ABOUT = "stock.json"
_STEP = re.compile(
    r"(?:^|___)step=(?P<step>[0-9]+)___rank=(?P<rank>[0-9]+)___dump_index=(?P<index>[0-9]+)___"
)
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
_KV = re.compile(r"(?:^|_)(?:attn|attention)(?:_m[a-z]a)?$")
_RECURRENT = re.compile(r"linear_attn|mamba|mixer|ssm|gdn|delta")
_CONVOLUTION = re.compile(r"conv")
_CORE = ("rids", "positions", "seq_lens")
_KV_TENSORS = 2


def regroup(dump_dir: Path) -> None:
    """Moves each forward that holds an armed request into a folder of its own; once, and only where
    `stock.json` says that the files are a server's own."""
    try:
        about = json.loads((dump_dir / ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    histories: Dict[int, RequestHistory] = {}
    states: Dict[int, Dict[str, Dict[str, Any]]] = {}
    for (rank, step), names in _forwards(dump_dir, about["exp_names"]).items():
        history = histories.setdefault(rank, RequestHistory())
        try:
            _one(dump_dir, rank, step, names, about, history, states.setdefault(rank, {}))
        except BadDump as error:
            _refuse(dump_dir, rank, str(error))
    for rank, modules in states.items():
        missing = _layers(modules) - _layers({path: m for path, m in modules.items() if m["state"]})
        if missing:
            _refuse(
                dump_dir, rank, f"no module of layer {min(missing)} can be told to read state by its name"
            )
        write_json_atomically(dump_dir / f"modules-{rank}.json", modules)
    (dump_dir / ABOUT).unlink()


def _forwards(dump_dir: Path, exp_names: List[str]) -> Dict[Tuple[int, int], List[Path]]:
    """The files of each forward by (rank, step), in the order in which they were written."""
    found: Dict[Tuple[int, int], List[Tuple[int, Path]]] = {}
    for name in exp_names:
        for path in (dump_dir / name).glob("*.pt"):
            step = _STEP.search(path.stem)
            if step is not None:
                key = (int(step.group("rank")), int(step.group("step")))
                found.setdefault(key, []).append((int(step.group("index")), path))
    return {key: [path for _, path in sorted(files)] for key, files in sorted(found.items())}


def _one(
    dump_dir: Path,
    rank: int,
    step: int,
    names: List[Path],
    about: Dict[str, Any],
    history: RequestHistory,
    modules: Dict[str, Dict[str, Any]],
) -> None:
    """Takes up one forward: its requests, its folder where an armed one is among them, its modules."""
    core = _core_fields(names)
    requests = _requests(core, about["nonce"], history)
    armed = [parse_rid(request[0], about["nonce"]) for request in requests]
    if not any(rid is not None and rid.armed for rid in armed):
        return
    if not any("___name=non_intrusive__" in path.name for path in names):
        raise BadDump(f"forward {step} holds no module's tensors: it ran in a CUDA graph, or hooks are off")
    place = dump_dir / f"rank{rank}-{step:09d}"
    place.mkdir(mode=0o700)
    size = 0
    for path in names:
        size += path.stat().st_size
        path.rename(place / path.name)
    files = dumped_files(place)
    for path_of_module, module in _states(files, about.get("windows", {})).items():
        known = modules.setdefault(path_of_module, module)
        known["state"] = known["state"] or module["state"]
    content = {
        "n": step,
        "mode": "decode" if all(request[5] == "decode" for request in requests) else "extend",
        "rows": len(core["positions"]),
        "requests": requests,
        "rank": rank,
        "nonce": about["nonce"],
        "expected_files": len(files),
        "files": len(files),
        "bytes": size,
    }
    write_json_atomically(place / "forward.json", content)


def _core_fields(names: List[Path]) -> Dict[str, List[Any]]:
    """Ids, positions and lengths of a forward; the model's own, which come first. Modules inside are given
    some under the same names, in other shapes. Raises BadDump where one is missing."""
    core: Dict[str, List[Any]] = {}
    for path in names:
        for field in _CORE:
            if field not in core and f"___name={field}___" in path.name:
                value = load(path)["value"]
                core[field] = [str(rid) for rid in value] if field == "rids" else value.tolist()
    missing = [field for field in _CORE if field not in core]
    if missing:
        raise BadDump(f"{names[0].name} and its forward lack {', '.join(missing)}")
    return core


def _requests(core: Dict[str, List[Any]], nonce: str, history: RequestHistory) -> List[List[Any]]:
    """[id, first position, rows, prefix length, sequence length, phase] of each request, in batch order; the
    id of foreign traffic is ""."""
    positions, lengths = core["positions"], core["seq_lens"]
    if len(core["rids"]) != len(lengths):
        raise BadDump("the forward has not as many lengths as requests")
    single = len(positions) == len(lengths)
    requests: List[List[Any]] = []
    row = 0
    for rid, length in zip(core["rids"], lengths, strict=True):
        if row >= len(positions):
            raise BadDump("the forward has fewer rows than its requests need")
        first = positions[row]
        rows = length - first
        # A step of one row each is a decode step for whoever has been seen before.
        phase = history.extend(rid, first, rows, single)
        shown = rid if parse_rid(rid, nonce) is not None else ""
        requests.append([shown, first, rows, first, length, phase])
        row += rows
    if row > len(positions):
        raise BadDump("the forward has fewer rows than its requests need")
    return requests


def _states(files: List[DumpedFile], windows: Dict[str, int]) -> Dict[str, Dict[str, Any]]:
    """For each module of a forward what state it reads, as capture.py describes modules."""
    inputs: Dict[str, Set[str]] = {}
    for file in files:
        name = file.name
        if name is not None and name.module:
            arguments = inputs.setdefault(name.module, set())
            if name.direction == IN:
                arguments.add(name.argument)
    modules: Dict[str, Dict[str, Any]] = {}
    for path, arguments in inputs.items():
        leaf = not any(other.startswith(f"{path}.") for other in inputs)
        state = _state(path.rsplit(".", 1)[-1], len(arguments)) if leaf else None
        layer = _LAYER.search(path)
        window = windows.get(layer.group(1)) if layer is not None and state == "kv" else None
        modules[path] = {"class": "", "state": state, "window": window}
    return modules


def _state(name: str, tensors: int) -> Optional[str]:
    if _RECURRENT.search(name):
        return "ssm"
    if _CONVOLUTION.search(name):
        return "conv"
    return "kv" if _KV.search(name) and tensors >= _KV_TENSORS else None


def _layers(modules: Dict[str, Dict[str, Any]]) -> Set[str]:
    return {found.group(1) for found in map(_LAYER.search, modules) if found is not None}


def _refuse(dump_dir: Path, rank: int, what: str) -> None:
    """Makes the rank's trace invalid; the first reason stands."""
    path = dump_dir / f"invalid-{rank}.json"
    with contextlib.suppress(FileNotFoundError):
        path.stat()
        return
    write_json_atomically(path, {"rank": rank, "what": what})
