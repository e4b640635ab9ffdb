"""The state probe from start to finding, where operators cannot be watched without the divergence going away.

    outcome = await probe_state(side, work, because=GONE, trace_dir=folder)

Captures as engine/capture.py does, without any hook: what is located names layer and position, no operator.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from klbench.engine.capture import Beforehand, Outcome, Progress, capture
from klbench.engine.captured_work import ServerSide, Work, as_whole_as_affordable
from klbench.engine.confirm import confirm
from klbench.engine.progress import ArmObserver

GONE = (
    "The divergence did not show while operators were watched (eager, hooks on): no operator can be named. "
    "What is said is from the state alone, looked at between forwards without a hook."
)
GRAPHS = (
    "This server replays CUDA graphs, which no hook sees. What is said is from the state alone, looked at "
    "between forwards; operators need the server started again with CUDA graphs off."
)
GONE_TOO = (
    "The divergence did not show while the state was looked at either: it does not repeat itself, or any "
    "look changes it."
)


async def probe_state(
    side: ServerSide,
    work: Work,
    *,
    because: str,
    trace_dir: Path,
    observe: ArmObserver | None = None,
    progress: Progress | None = None,
    beforehand: Beforehand | None = None,
) -> Outcome:
    """What the state says of `work`, with `because` among its notes. Raises what a capture raises."""
    whole = as_whole_as_affordable(side, work, "state")
    outcome = await capture(
        side,
        whole,
        trace_dir=trace_dir,
        backend="state",
        numbers=False,
        observe=observe,
        progress=progress,
        beforehand=beforehand,
    )
    if outcome.findings:
        outcome = await confirm(
            side, outcome, trace_dir=trace_dir, observe=observe, progress=progress, beforehand=beforehand
        )
    gone = () if outcome.symptom_shows else (GONE_TOO,)
    return dataclasses.replace(outcome, notes=(because, *gone))
