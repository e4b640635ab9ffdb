"""An origin as a folder that stands alone: its tensors and a script that shows the difference.

    export-1/
      tensors.safetensors    inputs and weights of the operator, and its outputs by number of rows
      show.py                a few lines of torch; runs without klbench and without a server
      origin.json            the finding, and what the tensors are

Made from what a replay kept beside the trace, or else from the rows of both arms; nothing is computed here
and no server is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from klbench.engine.confirm import replay_folder
from klbench.engine.export_script import Restated, arms_script, replay_script, restated
from klbench.engine.raw_tensors import RawTensor, read_raw, row_tensor, write_raw
from klbench.engine.replay import MAX_JSON_BYTES, decode_result
from klbench.engine.ulp_rows import ORIGIN_ROWS
from klbench.errors import UndecidedError
from klbench.storage import file_inside, read_small

# They become part of the script.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True, slots=True)
class Export:
    """What was written: `restated` says whether the script does the operator's arithmetic again."""

    folder: Path
    restated: bool
    why_not: str


def export_origin(finding: Mapping[str, Any], number: int, trace_dir: Path, folder: Path) -> Export:
    """Writes finding `number` of a trace into `folder` (new). Raises UndecidedError without tensors."""
    kept = _kept(replay_folder(trace_dir, number), finding.get("rank"))
    try:
        if kept is None:
            kind = finding.get("kind")
            called = "it was not called again alone"
            raise UndecidedError(called if kind == "operator" else f"a {kind} is no arithmetic of its rows")
        tensors, about = _from_replay(kept, str(finding.get("module")))
    except UndecidedError as error:
        tensors, about = _from_rows(trace_dir, number, error.why or error.what)
    title = f"{finding.get('kind')} in {finding.get('module')}"
    positions = finding.get("positions") or {}
    claim = f"Request {finding.get('request')}, row {positions.get('first')}: equal inputs, other output"
    many = finding.get("replay_M")
    claim += f" from {many} rows on." if many is not None else "."
    if "outputs" in about:
        arithmetic = restated(about["class"], list(tensors), about["attributes"])
        why_not = arithmetic if isinstance(arithmetic, str) else ""
        script = replay_script(
            title=title,
            claim=claim,
            outputs=about["outputs"],
            row=about["row"],
            rows=about["rows"],
            arithmetic=arithmetic,
        )
        done = isinstance(arithmetic, Restated)
    else:
        done, why_not = False, about["why"]
        script = arms_script(title=title, claim=claim, why=why_not)
    folder.mkdir(mode=0o700, parents=True)
    write_raw(folder / "tensors.safetensors", tensors)
    (folder / "show.py").write_text(script, encoding="utf-8")
    content = {"schema": "klbench.export/1", "finding": dict(finding), "about": about}
    (folder / "origin.json").write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    return Export(folder, done, why_not)


def _kept(replays: Path, rank: object) -> Path | None:
    """What the first of the replays kept of that rank. Raises UsageError for a link out of the folder."""
    if not isinstance(rank, int):
        return None
    found = next(iter(sorted(replays.glob(f"*/kept-{rank}.safetensors"))), None)
    return file_inside(replays, found.relative_to(replays).as_posix()) if found is not None else None


def _from_replay(kept: Path, module: str) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Inputs, weights and outputs of the operator that a replay blamed."""
    described = kept.with_suffix(".json").name.replace("kept-", "replay-")
    try:
        result = decode_result(read_small(file_inside(kept.parent, described), MAX_JSON_BYTES))
    except OSError as error:
        raise UndecidedError("what the replay wrote cannot be read", why=str(error)) from error
    number, operator = next(
        ((place, entry) for place, entry in enumerate(result.operators) if entry.module == module),
        (0, None),
    )
    if operator is None or not operator.arguments:
        reason = operator.reason if operator is not None else ""
        raise UndecidedError(f"{module} was not replayed", why=reason or "it was not called in the replay")
    content, metadata = read_raw(kept)
    rows, _ = read_raw(file_inside(kept.parent, kept.name.replace("kept-", "rows-")))
    tensors = {
        name.removeprefix(f"{number}/").replace("/", "."): tensor
        for name, tensor in content.items()
        if name.startswith(f"{number}/")
    }
    if not all(map(_NAME.fullmatch, (*tensors, *(entry.name for entry in operator.arguments)))):
        raise UndecidedError(f"the tensors of {module} have odd names")
    outputs: dict[int, str] = {}
    # The first output that changes, or the first one: one is enough to show it.
    argument = max(operator.arguments, key=lambda entry: max(entry.variants[0], default=0))
    for m, variant in zip(operator.tried, argument.variants[0], strict=True):
        row = rows.get(f"{number}/{argument.name}/0/{variant}")
        if row is not None:
            name = f"output.{argument.name}.variant-{variant}"
            tensors[name] = row_tensor(argument.dtype, row.content)
            outputs[m] = name
    if not outputs:
        raise UndecidedError(
            f"{module} gives the same bits with every number of rows",
            why="called again alone it gives the same bits with every number of rows",
        )
    about = json.loads(metadata.get("about", "{}")).get(str(number), {})
    return tensors, {
        "class": operator.class_name,
        "attributes": about.get("attributes", {}),
        "cut": about.get("cut", []),
        "left_out": about.get("left_out", []),
        "outputs": outputs,
        "row": operator.judged[0],
        "rows": operator.total,
    }


def _from_rows(trace_dir: Path, number: int, why: str) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """The recorded rows of both arms, where the operator was not called again."""
    path = file_inside(trace_dir, ORIGIN_ROWS)
    if not trace_dir.is_dir():
        raise UndecidedError(
            "the trace of this origin is gone", why=f"there is no folder {trace_dir}", next="locate it again"
        )
    if not path.is_file():
        raise UndecidedError(
            "no tensors of this origin were kept",
            why=f"its rows were not fetched, and {why}",
            next="locate it again",
        )
    content, _ = read_raw(path)
    prefix = f"{number}/"
    tensors = {
        name.removeprefix(prefix).replace("/", "."): tensor
        for name, tensor in content.items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise UndecidedError("no rows of this origin were fetched", next="locate it again")
    return tensors, {"why": why}
