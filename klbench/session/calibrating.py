"""Calibrations: the noise floor of a server from the repeated runs of a session, kept for later.

`calibrations.json` in klbench's home holds the latest one for each key (model, ranks, dtype, backend, GPU,
sglang version, numerics environment); a floor of another key is never shown for this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from klbench import paths
from klbench.core.calibration import calibration_key, noise_floor, propose
from klbench.core.columns import HELPERS
from klbench.errors import ExitCode, KlbenchError, UndecidedError
from klbench.session.columns import load_columns
from klbench.session.documents import header, iso_time
from klbench.session.folder import write_atomically
from klbench.session.state import SessionState

CALIBRATE_SCHEMA = "klbench.calibrate/1"
_LARGEST_BYTES = 16 << 20


def calibration_document(
    session: Path, state: SessionState, passes: int, error: KlbenchError | None = None
) -> dict[str, Any]:
    """klbench.calibrate/1 from the last `passes` runs of the session."""
    document = header(session, state, CALIBRATE_SCHEMA)
    document["key"] = calibration_key(document["server"])
    runs = [run for run in state.runs if run.ended and not run.cancelled][-passes:]
    document["passes"] = len(runs)
    document["prompts"] = dict(runs[-1].prompts) if runs else {}
    helpers: dict[str, Any] = {}
    for name in HELPERS:
        states = [found for run in runs if (found := run.helper(name)) is not None]
        if states:
            helpers[name] = _helper(session, states, document["server"])
    document["helpers"] = helpers
    if error is not None:
        document["error"] = error.as_dict()
    return document


def _helper(session: Path, states: list[Any], server: dict[str, Any]) -> dict[str, Any]:
    measured = [one for one in states if one.columns is not None]
    averages = [
        one.result["avg_kl_div"]
        for one in measured
        if one.result is not None and one.result.get("avg_kl_div") is not None
    ]
    statuses = [one.status for one in states]
    if len(averages) < 2 or len(averages) < len(measured):
        reason = next((one.result.get("reason") for one in states if one.result), None)
        return {"statuses": statuses, "averages": averages, "reason": reason, "proposal": None}
    columns = [load_columns(session / one.columns) for one in measured]
    floor = noise_floor(columns)
    return {
        "statuses": statuses,
        "averages": averages,
        "prefill_against_prefill": {name: getattr(floor.prefill, name) for name in floor.prefill.__slots__},
        "decode_against_decode": {name: getattr(floor.decode, name) for name in floor.decode.__slots__},
        "shortened": floor.shortened,
        "proposal": propose(averages, floor, server).as_dict(),
    }


def calibration_exit_code(document: dict[str, Any]) -> ExitCode:
    """5 where a helper allows no floor, 1 where one is not zero, else 0."""
    proposals = [helper["proposal"] for helper in document["helpers"].values()]
    if not proposals or any(proposal is None for proposal in proposals):
        return ExitCode.UNDECIDED
    zero = all(proposal["zero"] for proposal in proposals)
    return ExitCode.CONSISTENT if zero else ExitCode.DIVERGED


def _store() -> Path:
    return paths.home() / "calibrations.json"


def _read_store() -> list[dict[str, Any]]:
    try:
        file = _store()
        if not file.exists():
            return []
        if file.stat().st_size > _LARGEST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UndecidedError(
            f"cannot read the calibrations in {_store()}", why=str(error), next="move the file away"
        ) from error
    entries = content.get("calibrations") if isinstance(content, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def keep_calibration(document: dict[str, Any], at: float) -> Path:
    """Keeps the document's proposals as the latest of their key. Returns the file."""
    entry = {
        "at": iso_time(at),
        "key": document["key"],
        "passes": document["passes"],
        "prompts": document["prompts"],
        "proposals": {name: helper["proposal"] for name, helper in document["helpers"].items()},
    }
    entries = [known for known in _read_store() if known.get("key") != entry["key"]]
    content = json.dumps({"calibrations": [*entries, entry]}, indent=1).encode()
    paths.make_private(paths.home())
    write_atomically(_store(), content)
    return _store()


def kept_calibration(server: dict[str, Any]) -> dict[str, Any] | None:
    """The latest calibration of this very key, if there is one."""
    key = json.loads(json.dumps(calibration_key(server)))
    return next((entry for entry in reversed(_read_store()) if entry.get("key") == key), None)
