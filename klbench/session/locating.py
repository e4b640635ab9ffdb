"""One locate job: which request of which helper, whether this server can be captured, and the capture itself.

Invariants: what is captured was measured on this very server, so batches and results can be compared; the
default is the first diverged helper in the order of HELPERS and its first divergent request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from klbench.core.columns import HELPERS, ArmName, HelperColumns, HelperName
from klbench.engine.arms import NotRepeatedError
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import Backend, CaptureControl, RequestIds
from klbench.engine.captured_work import ServerSide, Work, as_whole_as_affordable, generation_tokens
from klbench.engine.confirm import confirm
from klbench.engine.dump_process import DumpProcess, DumpReaders
from klbench.engine.facts import read_model_config
from klbench.engine.pythonpath import plugin_environment
from klbench.engine.server import Server
from klbench.engine.server_python import find_server_python
from klbench.engine.state_probing import GONE, GRAPHS, probe_state
from klbench.engine.target import Plan
from klbench.errors import UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.attach_exports import how_to_be_captured
from klbench.session.forecasting import CaptureForecasts
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


def check_can_capture(server: Server, launch_s: float | None, asked: str | None = None) -> None:
    """Raises UndecidedError where this server cannot be captured as it runs, with what would allow it."""
    _check_ranks(server)
    if server.control_dir is None:
        raise UndecidedError(
            "this server cannot be captured",
            why="it was started without klbench's plugin, or klbench cannot tell where that writes: "
            "--path-map SERVER=LOCAL says it",
            next=how_to_be_captured(asked, server.paths),
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


def _check_ranks(server: Server) -> None:
    """Raises UndecidedError where not every part of the model would be seen."""
    facts = server.facts
    if (facts.pp_size or 1) > 1:
        raise UndecidedError(
            f"a server of {facts.pp_size} pipeline stages is not captured",
            why="each stage runs a part of the layers in forwards of its own; klbench does not put together "
            "what they do",
            next="start it with --pp-size 1, or with more --tp-size; the helpers run as it is",
        )
    if (facts.nnodes or 1) > 1 and len(server.presences) < facts.all_model_processes:
        raise UndecidedError(
            f"a server on {facts.nnodes} nodes is not captured from here",
            why=f"klbench's plugin is seen in {len(server.presences)} of {facts.all_model_processes} ranks: "
            "the others write into a folder that this machine does not see",
            next="start each node with KLBENCH_INSITU_DIR on a folder that all nodes share; "
            "the helpers run as it is",
        )


async def dump_process(server: Server, server_python: str | None) -> DumpProcess:
    """How to read dumps of a server with our plugin: with its own Python, or with one found here where it is
    attached."""
    if server.plan is not None:
        return _dumps_of_ours(server.plan)
    assert server.control_dir is not None
    assert server.nonce is not None
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


def _dumps_of_ours(plan: Plan) -> DumpProcess:
    return DumpProcess(plan.python.path, plan.spec.environment)


def server_side(server: Server, ids: RequestIds, dumps: DumpReaders | None = None) -> ServerSide:
    """What a capture needs of a server with our plugin; without `dumps` each capture starts its own reader,
    which must be one of a server that we launched."""
    assert server.control_dir is not None
    if dumps is None:
        assert server.plan is not None
        dumps = _dumps_of_ours(server.plan)
    ranks = sorted({presence.rank for presence in server.presences if presence.rank is not None})
    return ServerSide(
        client=server.client,
        control=CaptureControl(server.control_dir, ids.nonce, ranks, server.paths),
        ids=ids,
        dumps=dumps,
        model_config=read_model_config(server.facts.model, server.paths) or {},
        options=server.arm_options(),
        page_size=server.facts.page_size or 1,
        checkpoint_interval=server.facts.checkpoint_interval,
    )


class ArmsAsProgress:
    """Shows the arms that a capture repeats as the job's progress; they are no arms of a run."""

    def __init__(self, job: JobView) -> None:
        self._job = job
        self._phase = ""

    def arm_started(self, arm: ArmName, requests: int, tokens: int) -> None:
        self._phase = f"repeating the {arm} arm with {requests} requests"
        self._job.progress(self._phase, 0, tokens)

    def arm_progress(
        self, _arm: ArmName, done: int, total: int, _elapsed_s: float, eta_s: float | None
    ) -> None:
        self._job.progress(self._phase, done, total, eta_s)

    def arm_stalled(self, *_: object) -> None: ...

    def arm_unseen(self, *_: object) -> None: ...

    def arm_ended(self, arm: ArmName, elapsed_s: float) -> None:
        pass


_ENDS_EARLY = (
    "The server did not repeat all of its tokens, so only those up to the first divergence were captured: an "
    "origin that begins behind it is not seen."
)


async def repeated_so_far(watch: Callable[[Work], Awaitable[Outcome]], whole: Work, short: Work) -> Outcome:
    """`watch` of the whole generation as it comes; where that is not the measured run, of its beginning up to
    the first divergence, else of a run of its own that diverges, for which it is watched twice."""
    as_it_comes = dataclasses.replace(whole, must_repeat=False)
    outcome = await watch(as_it_comes)
    if outcome.repeats:
        return outcome
    if generation_tokens(short) < generation_tokens(whole):
        with contextlib.suppress(NotRepeatedError):
            beginning = await watch(dataclasses.replace(short, cut=_ENDS_EARLY))
            if beginning.symptom_shows:
                await _forget(outcome)
                return beginning
            await _forget(beginning)
    if outcome.symptom_shows:
        return outcome
    await _forget(outcome)
    return await watch(as_it_comes)


async def _forget(outcome: Outcome) -> None:
    """Removes what a capture left that is not told."""
    for folder in filter(None, (outcome.trace_dir, outcome.kept_dumps)):
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def trace_and_locate(
    session: Session,
    job: JobView,
    side: ServerSide,
    backend: Backend,
    chosen: Chosen,
    measured: HelperColumns,
    measured_pass: int,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Captures the chosen request and says what was found, and again once it is confirmed or not.

    Before anything is written it is said how much that will be, and asked where it is much. Where the
    divergence goes away while operators are watched, the state probe answers instead. A server that does not
    repeat itself is watched in runs of their own.
    """
    options = session.start.options
    began = time.monotonic()
    number = 1 + max((located.number for located in session.state.located), default=0)
    trace_dir = Path(options.trace_dir) if options.trace_dir else session.folder.traces
    arms = ArmsAsProgress(job)
    run = next((run for run in session.state.runs if run.number == chosen.run), None)
    took = run.helper(chosen.helper) if run is not None else None
    forecasts = CaptureForecasts(session, job, trace_dir, took.elapsed_s if took is not None else None)

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

    work = Work(
        helper=chosen.helper,
        prompts=prompts,
        request=chosen.request,
        measured=measured,
        max_new_tokens=options.max_new_tokens,
        measured_passes=(measured_pass,),
    )

    async def probe(because: str) -> Outcome:
        return await probe_state(
            side,
            dataclasses.replace(work, must_repeat=False),
            because=because,
            trace_dir=trace_dir,
            observe=arms,
            progress=job.progress,
            beforehand=forecasts,
        )

    if backend == "state":
        say(await probe(GRAPHS))
        return

    async def watch(what: Work) -> Outcome:
        return await capture(
            side,
            what,
            backend=backend,
            trace_dir=trace_dir,
            keep_dumps=options.keep_trace,
            observe=arms,
            progress=job.progress,
            beforehand=forecasts,
        )

    outcome = await repeated_so_far(watch, as_whole_as_affordable(side, work, backend), work)
    say(outcome)
    if not outcome.symptom_shows:
        say(await probe(GONE))
    elif outcome.findings:
        say(
            await confirm(
                side,
                outcome,
                trace_dir=trace_dir,
                observe=arms,
                progress=job.progress,
                beforehand=forecasts,
            )
        )
