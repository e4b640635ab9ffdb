"""Replays a located operator alone on a live server, with more row counts than the confirmation tried.

The rows are real: those of the request that was located, prompt and output. What comes out is an event; the
finding and its grade stay as they were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klbench.core.census import OperatorReplay, row_counts
from klbench.core.columns import HelperColumns, HelperName
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.confirm import KEEP_BYTES, carrier_tokens, replay_folder
from klbench.engine.replay import replay
from klbench.errors import UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.columns import load_columns
from klbench.session.exporting import finding_of
from klbench.session.replayable import check_can_replay
from klbench.session.runner import JobView, Session
from klbench.session.state import LocatedState, SessionState

_SMALL = range(1, 17)
"""Every M up to here is tried: kernels change their shape at small row counts."""


def located_to_replay(state: SessionState, locate: int | None) -> LocatedState:
    """What was located under this number, or last. Raises UsageError."""
    found = [one for one in state.located if locate in (None, one.number)]
    if not found:
        raise UsageError("nothing was located yet", next="locate an origin first")
    return found[-1]


async def replay_finding(
    session: Session, job: JobView, side: ServerSide, located: LocatedState, number: int
) -> None:
    """Calls the operator of finding `number` (from 0) with 1, 2, 3, ... rows and says what it found."""
    finding = finding_of(located, number)
    check_can_replay(finding)
    began = time.monotonic()
    measured = await asyncio.to_thread(_columns, session, located)
    work = Work(
        helper=_helper(located.helper),
        prompts=(),
        request=located.request,
        measured=measured,
        max_new_tokens=session.start.options.max_new_tokens,
    )
    positions = finding.get("positions")
    position = int(positions["first"]) if isinstance(positions, Mapping) else 0
    tokens, arms = carrier_tokens(work, position), _arm_rows(finding)
    job.progress(f"replaying {finding.get('module')}", 0, 0)
    traces = Path(session.start.options.trace_dir or session.folder.traces)
    found = await replay(
        side,
        tokens,
        folder=replay_folder(traces / f"again-{located.number}-{int(time.time())}", number),
        rows={*_SMALL, *row_counts(max(len(tokens), *arms, 1)), *arms},
        modules=[str(finding.get("module"))],
        wrap=True,
        position=position,
        keep_bytes=KEEP_BYTES,
    )
    result = {**_of_rank(found, finding).as_dict(), "arms_M": arms}
    session.emit(
        ev.Replayed(locate=located.number, finding=number, result=result, elapsed_s=time.monotonic() - began)
    )


def _columns(session: Session, located: LocatedState) -> HelperColumns:
    run = next((run for run in session.state.runs if run.number == located.run), session.state.run)
    helper = run.helper(located.helper) if run is not None else None
    if helper is None or helper.columns is None:
        raise UndecidedError(f"the tokens of {located.helper} are not there", next="run the helpers again")
    return load_columns(session.folder.resolve(helper.columns))


def _helper(name: str) -> HelperName:
    if name == "match":
        return "match"
    return "prefill_cache_hit" if name == "prefill_cache_hit" else "decode_cache_hit"


def _arm_rows(finding: Mapping[str, Any]) -> list[int]:
    """How many rows shared the call in each of the two arms, as far as the evidence says."""
    name = "head_rows" if finding.get("kind") == "head" else "batch_rows"
    for fact in finding.get("evidence") or ():
        values = fact.get("values") if isinstance(fact, Mapping) else None
        rows = values.get(name) if isinstance(values, Mapping) else None
        if isinstance(rows, list):
            return [int(count) for count in rows]
    return []


def _of_rank(found: tuple[OperatorReplay, ...], finding: Mapping[str, Any]) -> OperatorReplay:
    """The replay of the finding's rank. Raises UndecidedError."""
    same = [one for one in found if one.module == finding.get("module") and one.rank == finding.get("rank")]
    if not same:
        raise UndecidedError(f"{finding.get('module')} was not called by itself in the carrier's forward")
    return same[0]
