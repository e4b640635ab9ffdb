"""One census: which operators of the model are batch-invariant, as an event, a document and an exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klbench.core.census import STATUSES, census_body
from klbench.engine.captured_work import ServerSide
from klbench.engine.census import take_census
from klbench.errors import ExitCode, KlbenchError
from klbench.session import events as ev
from klbench.session.documents import header
from klbench.session.runner import JobView, Session
from klbench.session.state import CensusState, SessionState

CENSUS_SCHEMA = "klbench.census/1"


async def census(session: Session, job: JobView, side: ServerSide, prompts: Sequence[Sequence[int]]) -> None:
    """Takes the census and says what it found. Raises KlbenchError where nothing could be replayed."""
    began = time.monotonic()
    number = 1 + max((taken.number for taken in session.state.censuses), default=0)
    options = session.start.options
    traces = Path(options.trace_dir) if options.trace_dir else session.folder.traces
    job.progress("replaying operators", 0, 0)
    operators = await take_census(
        side,
        prompts,
        folder=traces / f"census-{number}-{int(time.time())}",
        progress=lambda done, total: job.progress("replaying operators", done, total),
    )
    session.emit(
        ev.CensusTaken(census=number, result=census_body(operators), elapsed_s=time.monotonic() - began)
    )


def census_document(session: Path, state: SessionState, error: KlbenchError | None = None) -> dict[str, Any]:
    """klbench.census/1 of the latest census; without one what there is, with `error`."""
    document = header(session, state, CENSUS_SCHEMA)
    taken = state.latest_census
    empty = {"rows": 0, "tried_M": [], "summary": dict.fromkeys(STATUSES, 0), "operators": []}
    document |= dict(taken.result) if taken is not None else empty
    if error is not None:
        document["error"] = error.as_dict()
    return document


def census_exit_code(taken: CensusState | None) -> ExitCode:
    """1 if an operator is not invariant, else 5 if one that has no state was not judged, else 0."""
    if taken is None:
        return ExitCode.UNDECIDED
    summary = taken.result.get("summary", {})
    if summary.get("not_invariant"):
        return ExitCode.DIVERGED
    unjudged = sum(summary.get(status, 0) for status in ("not_repeatable", "error", "skipped"))
    return ExitCode.CONSISTENT if summary.get("invariant") and not unjudged else ExitCode.UNDECIDED
