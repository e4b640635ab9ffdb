"""Where a session stands on the guided path, from its state."""

from __future__ import annotations

from collections.abc import Collection

from klbench.core.guide import GuideFacts
from klbench.session.state import SessionState


def guide_facts(state: SessionState, *, reported: bool = False, skipped: Collection[str] = ()) -> GuideFacts:
    """What the guide needs to know. `reported`: a report lies in the folder that the log does not tell of."""
    located = state.located_now
    findings = located.result.get("findings") if located is not None else None
    return GuideFacts(
        server=dict(state.server.facts),
        verdict=state.run.verdict if state.run is not None else None,
        findings=[f for f in findings if isinstance(f, dict)] if isinstance(findings, list) else (),
        located=located is not None,
        experiments=[dict(made.result) for made in state.experiments_of(state.run)],
        reported=reported or bool(state.reports),
        skipped=skipped,
        doing=state.job.kind if state.job is not None else "",
    )
