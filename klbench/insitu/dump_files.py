"""The stock dumper's files as they lie in a folder: names, order, forwards. Nothing is unpickled but data.

    rank0-000000012/                             one forward of one rank, as capture.py numbers it
      step=12___rank=0___dump_index=7___name=non_intrusive__model.norm.output___recompute_status=....pt
      forward.json                               its composition, and how many files it has

Files are read with `weights_only=True` and never otherwise.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch

from .rids import RequestId, parse_rid
from .trace_writer import IN, OUT

_FOLDER = re.compile(r"rank([0-9]+)-([0-9]+)")
_FILE = re.compile(
    r"(?:^|___)dump_index=(?P<index>[0-9]+)___name=(?P<name>.*?)___recompute_status="
    r"(?:.*___layer_id=(?P<layer>[0-9]+)(?:___|$))?"
)
_PREFIX = "non_intrusive__"
_LAYER = re.compile(r"((?:^|\.)layers\.)([0-9]+)(?=\.|$)")


class BadDump(Exception):
    """A dump that cannot be trusted: what is wrong, with its file."""


@dataclass(frozen=True)
class Name:
    """What a hook tensor is: `non_intrusive__model.norm.output.1` is ("model.norm", OUT, "1")."""

    module: str
    direction: int
    argument: str


def parse_name(name: str, layer_id: Optional[int]) -> Optional[Name]:
    """The parts of a dumper name, None for a core field.

    The dumper numbers the tensors of a tuple only when there are several, so `output` in one phase is
    `output.0` in the other: both are argument "0", and `inputs.1.0` is `inputs.1`. A module that layers share
    (rotary embedding) carries the path of the first layer: the layer it was called in replaces that.
    """
    if not name.startswith(_PREFIX):
        return None
    parts = name[len(_PREFIX) :].split(".")
    # The last of the two words, unless it is itself the name of a keyword input.
    place = max((i for i, part in enumerate(parts) if part in ("inputs", "output")), default=None)
    if place is None:
        return None
    if parts[place] == "output" and place > 0 and parts[place - 1] == "inputs":
        place -= 1
    argument = parts[place + 1 :]
    if len(argument) > 1 and argument[-1] == "0":
        argument = argument[:-1]
    module = ".".join(parts[:place])
    if layer_id is not None:
        module = _LAYER.sub(lambda found: f"{found.group(1)}{layer_id}", module, count=1)
    direction = IN if parts[place] == "inputs" else OUT
    return Name(module, direction, ".".join(argument) or "0")


@dataclass(frozen=True)
class DumpedTensor:
    """One file of a forward, in execution order. `name` is None for a core field, which `core` names."""

    path: Path
    name: Optional[Name]
    core: str
    layer_id: Optional[int]
    value: Any


def load(path: Path) -> Dict[str, Any]:
    """One file of the dumper, as data. Raises BadDump for anything else."""
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True)
    except Exception as error:
        raise BadDump(f"{path.name} cannot be read as data: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("meta"), dict) or "value" not in content:
        raise BadDump(f"{path.name} is not a file of the dumper")
    return content


@dataclass(frozen=True)
class DumpedFile:
    """What a file's name says: its place in the order and what it holds."""

    index: int
    path: Path
    text: str
    layer_id: Optional[int]

    @property
    def name(self) -> Optional[Name]:
        return parse_name(self.text, self.layer_id)


def dumped_files(folder: Path) -> List[DumpedFile]:
    """The files of one forward in the order in which they were written, none of them opened."""
    files = []
    for path in folder.glob("*.pt"):
        found = _FILE.search(path.stem)
        if found is None:
            raise BadDump(f"{path.name} has no place in the order")
        layer = found.group("layer")
        layer_id = None if layer is None else int(layer)
        files.append(DumpedFile(int(found.group("index")), path, found.group("name"), layer_id))
    return sorted(files, key=lambda file: file.index)


def dumped_tensors(folder: Path) -> Iterator[DumpedTensor]:
    """The content of one forward's files, in order; what is inside names it, not the file's name."""
    for file in dumped_files(folder):
        content = load(file.path)
        meta = content["meta"]
        layer = meta.get("layer_id")
        layer_id = layer if isinstance(layer, int) else None
        name = parse_name(str(meta.get("name")), layer_id)
        yield DumpedTensor(file.path, name, str(meta.get("name")), layer_id, content["value"])


@dataclass(frozen=True)
class DumpedForward:
    """One captured forward: its folder and what capture.py wrote about it."""

    folder: Path
    rank: int
    number: int
    about: Dict[str, Any]

    def armed_parts(self) -> Iterator[Tuple[RequestId, int, int, str, int]]:
        """For each armed request: its id, first position, rows, phase and first row in the batch."""
        row = 0
        for rid, first, rows, _, _, phase in self.about["requests"]:
            parsed = parse_rid(rid, self.about["nonce"])
            if parsed is not None and parsed.armed:
                yield parsed, first, rows, phase, row
            row += rows


def dumped_forwards(dump_dir: Path) -> List[DumpedForward]:
    """All captured forwards by rank and number. Raises BadDump where one was not finished."""
    forwards = []
    for folder in dump_dir.iterdir():
        found = _FOLDER.fullmatch(folder.name)
        if found is None or not folder.is_dir():
            continue
        try:
            about = json.loads((folder / "forward.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadDump(f"{folder.name} was not finished: {error}") from error
        forwards.append(DumpedForward(folder, int(found.group(1)), int(found.group(2)), about))
    return sorted(forwards, key=lambda forward: (forward.rank, forward.number))


Argument = Tuple[str, int, int, str]
"""Module, call, direction and argument."""


class Folds:
    """Folds the tensors of one rank to rows. What one forward has shown to have no rows has none in any later
    one, where its size may be a multiple of theirs."""

    def __init__(self) -> None:
        self.without_rows: Set[Argument] = set()

    def folded(self, argument: Argument, value: torch.Tensor, rows: int) -> Optional[torch.Tensor]:
        """`value` as [rows, rest] where its first dimension is a multiple of `rows`, else None.

        Dimensions of one in front (a batch of one) are passed over. A weight has no rows.
        """
        while value.dim() > 1 and value.shape[0] == 1:
            value = value[0]
        if isinstance(value, torch.nn.Parameter) or argument in self.without_rows:
            return None
        if value.dim() == 0 or rows == 0 or value.shape[0] == 0:
            return None
        if value.shape[0] % rows:
            self.without_rows.add(argument)
            return None
        return value.reshape(rows, -1)
