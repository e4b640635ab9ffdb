"""One locate job: which request of which helper, whether this server can be captured, and the capture itself.

Invariants: what is captured was measured on this very server, so batches and results can be compared; the
default is the first diverged helper in the order of HELPERS and its first divergent request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klbench.core.columns import HELPERS, ArmName, HelperColumns, HelperName
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import CaptureControl, RequestIds
from klbench.engine.captured_work import ServerSide, Work
from klbench.engine.confirm import confirm
from klbench.engine.dump_process import DumpProcess
from klbench.engine.facts import read_model_config
from klbench.engine.pythonpath import plugin_environment
from klbench.engine.server import Server
from klbench.engine.server_python import find_server_python
from klbench.errors import UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.attach_exports import make_exports
from klbench.session.runner import JobView, Session
from klbench.session.state import HelperState, RunState, SessionState


@dataclass(frozen=True, slots=True)
class Chosen:
    """The divergent request whose origin is looked for."""

    run: int
    helper: HelperName
    request: int


def choose(state: SessionState, helper: str | None, request: int | None) -> Chosen:
    """The request to trace. Raises UsageError where the latest run has no such divergence."""
    run = state.run
    if run is None:
        raise UsageError("nothing was measured yet", next="run the helpers first")
    if helper is not None and helper not in HELPERS:
        raise UsageError(f"there is no helper {helper!r}", why=f"there are: {', '.join(HELPERS)}")
    for name in HELPERS:
        found = run.helper(name)
        if found is None or helper not in (None, name):
            continue
        divergent = _divergent_requests(found)
        if not divergent or (helper is None and found.status != "diverged"):
            continue
        if request is not None and request not in divergent:
            raise UsageError(
                f"request {request} of {name} does not diverge",
                why=f"divergent: {', '.join(map(str, divergent[:10]))}",
                next="choose one of these",
            )
        return Chosen(run.number, name, divergent[0] if request is None else request)
    raise UsageError(
        f"{helper or 'no helper'} {'did not diverge' if helper else 'diverged'} in run {run.number}",
        why=_statuses(run),
        next="there is nothing to locate",
    )


def _divergent_requests(helper: HelperState) -> list[int]:
    details = (helper.result or {}).get("requests_detail", [])
    return sorted(int(detail["index"]) for detail in details if detail.get("first_divergence"))


def _statuses(run: RunState) -> str:
    return " · ".join(f"{helper.helper} {helper.status}" for helper in run.helpers)


def check_can_capture(server: Server, launch_s: float | None) -> None:
    """Raises UndecidedError where this server cannot be captured as it runs, with what would allow it."""
    if server.control_dir is None:
        exports = "; ".join(make_exports().lines)
        raise UndecidedError(
            "this server cannot be captured",
            why="it was not started with klbench's plugin, or klbench cannot tell",
            next=f"put this before its launch, with CUDA graphs off, and attach again: {exports}",
        )
    if not server.ready_to_capture and not server.owned:
        raise UndecidedError(
            "this server cannot be captured as it runs",
            why="it replays CUDA graphs, which no hook sees",
            next="start it again with the same exports and CUDA graphs off (--disable-cuda-graph)",
        )
    if not server.ready_to_capture:
        raise UndecidedError(
            "this server cannot be captured as it runs",
            why="it replays CUDA graphs, which no hook sees",
            next=f"start it again ready to capture, about {launch_s or server.launch_s:.0f} s; "
            "then its divergence is checked again",
        )


async def attached_dumps(server: Server, server_python: str | None) -> DumpProcess | None:
    """How to read dumps of an attached server, with a Python found here; None for one of ours."""
    if server.plan is not None or server.control_dir is None or server.nonce is None:
        return None
    python = await find_server_python(Path(server_python) if server_python else None)
    environment = plugin_environment(
        server.control_dir,
        server.nonce,
        cpu=False,
        fault=None,
        base_env=os.environ,
        server_path=[server.control_dir / "pythonpath" / "plugin"],
    )
    return DumpProcess(python.path, environment)


def server_side(server: Server, ids: RequestIds, dumps: DumpProcess | None = None) -> ServerSide:
    """What a capture needs of a server with our plugin; `dumps` for an attached one."""
    assert server.control_dir is not None
    if dumps is None:
        assert server.plan is not None
        dumps = DumpProcess(server.plan.python.path, server.plan.spec.environment)
    ranks = sorted({presence.rank for presence in server.presences if presence.rank is not None})
    return ServerSide(
        client=server.client,
        control=CaptureControl(server.control_dir, ids.nonce, ranks),
        ids=ids,
        dumps=dumps,
        model_config=read_model_config(server.facts.model) or {},
        options=server.arm_options(),
    )


class ArmsAsProgress:
    """Shows the arms that a capture repeats as the job's progress; they are no arms of a run."""

    def __init__(self, job: JobView) -> None:
        self._job = job

    def arm_started(self, arm: ArmName, requests: int, tokens: int) -> None:
        self._job.progress(f"repeating the {arm} arm with {requests} requests", 0, tokens)

    def arm_progress(
        self, arm: ArmName, done: int, total: int, elapsed_s: float, eta_s: float | None
    ) -> None:
        pass

    def arm_ended(self, arm: ArmName, elapsed_s: float) -> None:
        pass


async def trace_and_locate(
    session: Session,
    job: JobView,
    side: ServerSide,
    chosen: Chosen,
    measured: HelperColumns,
    measured_pass: int,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Captures the chosen request and says what was found, and again once it is confirmed or not."""
    options = session.start.options
    began = time.monotonic()
    number = 1 + max((located.number for located in session.state.located), default=0)
    trace_dir = Path(options.trace_dir) if options.trace_dir else session.folder.traces
    arms = ArmsAsProgress(job)

    def say(outcome: Outcome) -> None:
        session.emit(
            ev.Located(
                locate=number,
                run=chosen.run,
                helper=chosen.helper,
                request=chosen.request,
                result=outcome.body(),
                elapsed_s=time.monotonic() - began,
            )
        )

    outcome = await capture(
        side,
        Work(
            helper=chosen.helper,
            prompts=prompts,
            request=chosen.request,
            measured=measured,
            max_new_tokens=options.max_new_tokens,
            measured_passes=(measured_pass,),
        ),
        trace_dir=trace_dir,
        keep_dumps=options.keep_trace,
        observe=arms,
        progress=job.progress,
    )
    say(outcome)
    if outcome.findings:
        say(await confirm(side, outcome, trace_dir=trace_dir, observe=arms, progress=job.progress))
