"""The runner's work on the real engine: launch, run, locate, report.

Invariants: every fact goes out as an event before anything else happens with it; a helper's columns are on
disk before the event that names them; whatever ends a job early, its run gets an end and a verdict from what
was measured; an attached server is never flushed before its user agreed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.experiments import AS_IT_IS, Configuration
from klbench.engine.capture_control import RequestIds
from klbench.engine.checkout import read_checkout
from klbench.engine.client import Keys
from klbench.engine.prompts import PromptSet, check_fits, load_prompts, read_prompt_file
from klbench.engine.server import LaunchError, Server
from klbench.engine.target import Demo, Launch, LaunchOptions
from klbench.errors import KlbenchError, ServerError, UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.attach_exports import attach_root
from klbench.session.census import census
from klbench.session.continuing import check_same_prompts, interrupted, recorded_prompts
from klbench.session.experimenting import (
    ExperimentBench,
    configured_arguments,
    judge_again,
    known_experiments,
    make_experiments,
)
from klbench.session.locating import (
    Chosen,
    attached_dumps,
    check_can_capture,
    choose,
    server_side,
    trace_and_locate,
)
from klbench.session.measuring import Measurement
from klbench.session.report import write_report
from klbench.session.request import Options
from klbench.session.runner import JobView, Session
from klbench.session.state import RunState
from klbench.zoo import Kind


def make_work(session: Session) -> Bench:
    """What a runner calls to get its work."""
    return Bench(session)


class _ServerEvents:
    """Turns what the engine observes into events."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def starting(self, command: str, log: Path, ready_to_capture: bool, fault: str | None) -> None:
        self._session.emit(
            ev.ServerStarting(
                command=command,
                log=self._session.folder.relative(log),
                ready_to_capture=ready_to_capture,
                fault=fault,
            )
        )

    def phase(self, phase: str, elapsed_s: float, detail: str) -> None:
        # A server is ready for us once its facts are read: ServerReady says so.
        if phase != "ready":
            self._session.emit(ev.ServerPhase(phase=phase, elapsed_s=elapsed_s, detail=detail))

    def call(self, line: str, outcome: str, elapsed_s: float) -> None:
        self._session.emit(ev.Call(line=line, outcome=outcome, elapsed_s=elapsed_s))

    def warning(self, what: str, why: str, next: str) -> None:
        self._session.emit(ev.Trouble(level="warning", what=what, why=why, next=next))


class Bench:
    """Owns the server of one session; see runner.Work."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = _ServerEvents(session)
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._request_ids: RequestIds | None = None
        self._measured: dict[tuple[int, HelperName], tuple[int, HelperColumns]] = {}
        """What was measured on the server at hand: by run and helper, the pass and the columns."""
        self._prompts: PromptSet | None = None
        self._agreed = session.start.options.yes_flush
        self._configuration = AS_IT_IS

    # -- the server ---------------------------------------------------------------------------------------

    async def launch(self, job: JobView) -> None:
        """Starts the server or attaches to it; nothing when it is ready."""
        await self._ready_server(job)

    async def _ready_server(self, job: JobView) -> Server:
        if self._configuration is not AS_IT_IS:
            await self.close()
            self._configuration = AS_IT_IS
        if self._server is None:
            await asyncio.to_thread(_check_prompt_file, self._session.start.options)
            self._server = await self._start(job, self._session.start.options.ready_to_capture)
        elif self._watch is not None and self._watch.done():
            end = self._session.state.server.ended
            raise ServerError(
                "the server has ended",
                why=end.why if end is not None else "",
                next="start it again; everything measured is kept",
            )
        return self._server

    async def _start(self, job: JobView, ready_to_capture: bool) -> Server:
        target, options = self._session.start.target, self._session.start.options
        keys = Keys(options.api_key_env, options.admin_api_key_env)
        if target.kind == "url":
            server = await Server.attach(
                target.url, observe=self._events, keys=keys, attach_root=attach_root()
            )
        else:
            job.progress("starting the server", 0, 0, self._session.state.server.launch_s)
            server = await self._launch(keys, ready_to_capture)
        self._session.emit(
            ev.ServerReady(
                server=server.facts.as_dict(),
                url=server.url,
                launch_s=server.launch_s,
                differs=server.differs,
                notes=list(server.notes),
            )
        )
        await self._say_code(server)
        if server.owned:
            self._watch = asyncio.create_task(self._report_end(server), name="klbench-server-watch")
        return server

    async def _say_code(self, server: Server) -> None:
        """Which code it is, where sglang is imported from a checkout: a later comparison names the change."""
        package = server.facts.sglang_path
        if server.facts.git_commit is None or package is None:
            return
        checkout = await read_checkout(Path(package))
        if checkout is not None:
            self._session.emit(
                ev.CodeSeen(
                    root=str(checkout.root),
                    commit=checkout.commit,
                    subject=checkout.subject,
                    changed=dict(checkout.changed),
                )
            )

    async def _launch(self, keys: Keys, ready_to_capture: bool) -> Server:
        target, options = self._session.start.target, self._session.start.options
        what = Demo(cast(Kind, target.model)) if target.kind == "demo" else Launch(target.model_path)
        launch_options = LaunchOptions(
            arguments=configured_arguments(target.arguments, self._configuration),
            deterministic=options.deterministic,
            ready_to_capture=ready_to_capture,
            fault=options.fault,
            server_python=Path(options.server_python) if options.server_python else None,
        )
        try:
            return await Server.start(
                what,
                launch_options,
                folder=self._session.folder.server,
                observe=self._events,
                keys=keys,
                launch_timeout_s=options.launch_timeout_s,
            )
        except LaunchError as error:
            ended = error.ended
            self._server_ended(False, ended.exit_code, ended.why, ended.last_lines)
            raise
        except KlbenchError as error:
            self._server_ended(False, None, error.what, ())
            raise
        except asyncio.CancelledError:
            self._server_ended(True, None, "cancelled while it started", ())
            raise

    async def _report_end(self, server: Server) -> None:
        ended = await server.wait_ended()
        self._server_ended(ended.expected, ended.exit_code, ended.why, ended.last_lines)

    def _server_ended(self, expected: bool, exit_code: int | None, why: str, lines: Sequence[str]) -> None:
        self._session.emit(
            ev.ServerEnded(expected=expected, exit_code=exit_code, why=why, last_lines=list(lines))
        )

    async def relaunch(self, job: JobView, ready_to_capture: bool) -> None:
        """Stops our server and starts it again, eager when asked."""
        if self._session.start.target.kind == "url":
            raise UsageError(
                "this server is not ours to start again",
                why="klbench is attached to it",
                next="restart it yourself, then open a new session",
            )
        await self.close()
        ready = ready_to_capture or self._session.start.options.ready_to_capture
        self._server = await self._start(job, ready)

    async def close(self) -> None:
        """Ends the server, however it stands."""
        server, self._server = self._server, None
        self._request_ids = None
        self._measured.clear()
        if server is None:
            return
        if server.owned:
            self._session.emit(ev.ServerPhase(phase="stopping", elapsed_s=0.0))
        await asyncio.shield(server.stop())
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None

    # -- the jobs -----------------------------------------------------------------------------------------

    async def run(self, job: JobView, helpers: tuple[str, ...]) -> None:
        """Runs the helpers, all three when none is named."""
        server = await self._ready_server(job)
        await self._measure(job, server, await self._prompts_for(server), _helper_names(helpers))

    async def resume(self, job: JobView) -> None:
        """Continues the latest run where it was interrupted, with the prompts that it had."""
        found = interrupted(self._session.state)
        if found is None:
            raise UsageError("no run was interrupted", next="run the helpers")
        server = await self._ready_server(job)
        prompts = await asyncio.to_thread(recorded_prompts, self._session.folder, found.run)
        if prompts is None:
            prompts = await self._prompts_for(server)
            check_same_prompts(prompts, found.run)
        self._prompts = prompts
        await self._measure(job, server, prompts, found.left, found.run)

    async def _measure(
        self,
        job: JobView,
        server: Server,
        prompts: PromptSet,
        helpers: Sequence[HelperName],
        continues: RunState | None = None,
    ) -> None:
        server.check_comparable()
        check_fits(
            prompts.prompts,
            helpers,
            self._session.start.options.max_new_tokens,
            server.facts.context_length,
        )
        await self._agree_to_flush(job, server, helpers, prompts)
        measurement = Measurement(self._session, server, prompts, helpers, self._ids(server), continues)
        try:
            await measurement.execute(job)
        finally:
            self._measured.update(measurement.measured)

    async def _prompts_for(self, server: Server) -> PromptSet:
        """The session's prompts, the same for every run."""
        if self._prompts is None:
            options = self._session.start.options
            self._prompts = await load_prompts(
                server,
                options.prompts,
                samples=options.samples,
                prompt_tokens=options.prompt_tokens,
                seed=options.seed,
            )
            for note in self._prompts.notes:
                self._session.emit(ev.Trouble(level="note", what=note))
        return self._prompts

    async def _agree_to_flush(
        self, job: JobView, server: Server, helpers: Sequence[HelperName], prompts: PromptSet
    ) -> None:
        """Says what will be done to a server that is not ours, and waits until its user agrees."""
        if server.owned or self._agreed:
            return
        load = await server.client.load()
        busy = (
            f"{load.running} requests run on it and {load.queued} wait"
            if load is not None
            else "it does not say how busy it is"
        )
        flushes = 2 * len(helpers)
        new_tokens = self._session.start.options.max_new_tokens * len(prompts.prompts)
        await job.ask(
            f"flush the cache of {server.url} {flushes} times and generate about "
            f"{new_tokens * (len(helpers) + ('decode_cache_hit' in helpers))} tokens on it",
            f"{busy}; its other users lose their cached prefixes",
        )
        self._agreed = True

    def _ids(self, server: Server) -> RequestIds:
        """The request ids of this server, by which the plugin knows our requests."""
        if self._request_ids is None:
            self._request_ids = RequestIds(server.nonce or secrets.token_hex(4))
            if not server.owned:
                # It outlives this session, and remembers the passes of earlier ones by their numbers.
                self._request_ids.latest_pass = int(time.time()) % 900_000_000
        return self._request_ids

    async def locate(self, job: JobView, helper: str | None, request: int | None, relaunch: bool) -> None:
        """Locates the origin of a divergence of the latest run.

        A server that cannot be captured as it runs is started again where `relaunch` allows it; whatever was
        not measured on the server at hand is measured again first.
        """
        chosen = choose(self._session.state, helper, request)
        server = await self._capturing_server(job, relaunch)
        prompts = await self._prompts_for(server)
        if (chosen.run, chosen.helper) not in self._measured:
            measurement = Measurement(self._session, server, prompts, [chosen.helper], self._ids(server))
            await measurement.execute(job)
            self._measured.update(measurement.measured)
            chosen = self._still_there(chosen, request)
        measured_pass, columns = self._measured[chosen.run, chosen.helper]
        dumps = await attached_dumps(server, self._session.start.options.server_python)
        side = server_side(server, self._ids(server), dumps)
        await trace_and_locate(self._session, job, side, chosen, columns, measured_pass, prompts.as_lists())
        judge_again(self._session)

    async def _capturing_server(self, job: JobView, relaunch: bool) -> Server:
        """A server whose operators can be seen; started again for it where `relaunch` allows that."""
        server = await self._ready_server(job)
        try:
            check_can_capture(server, self._session.state.server.launch_s)
        except UndecidedError as error:
            if not (relaunch and server.owned):
                raise
            self._session.emit(ev.Trouble(level="note", what=error.what, why=error.why, next=error.next))
            await self.relaunch(job, True)
            server = await self._ready_server(job)
            check_can_capture(server, self._session.state.server.launch_s)
        return server

    async def census(self, job: JobView, relaunch: bool) -> None:
        """Replays the model's operators on the rows of one of the session's prompts."""
        server = await self._capturing_server(job, relaunch)
        prompts = await self._prompts_for(server)
        dumps = await attached_dumps(server, self._session.start.options.server_python)
        await census(self._session, job, server_side(server, self._ids(server), dumps), prompts.as_lists())

    def _still_there(self, before: Chosen, request: int | None) -> Chosen:
        """The same choice in the run just made. Raises UndecidedError when the divergence went away."""
        try:
            return choose(self._session.state, before.helper, request)
        except UsageError as error:
            raise UndecidedError(
                f"the divergence of {before.helper} does not show on the server as it runs now",
                why=error.why or error.what,
                next="what differs between the two servers is a lead: CUDA graphs are off for capture",
            ) from error

    async def experiment(
        self, job: JobView, names: tuple[str, ...], helper: str | None, max_relaunches: int | None
    ) -> None:
        """Makes experiments on the helper named, else on the first diverged one, else on match."""
        known_experiments(names)
        server = await self._ready_server(job)
        prompts = await self._prompts_for(server)
        run = self._session.state.run
        chosen = _helper_to_try(run, helper)
        if run is None or (run.number, chosen) not in self._measured:
            await self._measure(job, server, prompts, [chosen])
            run = self._session.state.run
        assert run is not None
        if (run.number, chosen) not in self._measured:
            raise UndecidedError(
                f"{chosen} was not measured on this server", next="run the helpers, or choose another"
            )
        await self._agree_to_flush(job, server, [chosen], prompts)
        found = run.helper(chosen)
        await make_experiments(
            self._session,
            job,
            server,
            names,
            chosen,
            prompts.as_lists(),
            self._measured[run.number, chosen],
            ExperimentBench(lambda configuration: self._reconfigure(job, configuration), self._ids),
            pass_s=(found.elapsed_s if found is not None else None) or 0.0,
            max_relaunches=max_relaunches,
        )

    async def _reconfigure(self, job: JobView, configuration: Configuration) -> Server:
        """Our server in another configuration; the next job of another kind starts the original again."""
        await self.close()
        self._configuration = configuration
        self._server = await self._start(job, self._session.start.options.ready_to_capture)
        return self._server

    async def report(self, job: JobView) -> None:
        """Writes the Markdown and the JSON report."""
        job.progress("writing the report", 0, 2)
        files = await asyncio.to_thread(write_report, self._session.folder, self._session.state)
        folder = self._session.folder
        self._session.emit(ev.ReportWritten(files=[folder.relative(file) for file in files]))


def _check_prompt_file(options: Options) -> None:
    """Raises UsageError for a prompt file that cannot be used, before a long launch and not after it."""
    if options.prompts not in (None, "longbench"):
        read_prompt_file(Path(options.prompts or ""), options.samples)


def _helper_to_try(run: RunState | None, helper: str | None) -> HelperName:
    """The helper that experiments repeat."""
    if helper is not None:
        return _helper_names([helper])[0]
    for name in HELPERS:
        found = run.helper(name) if run is not None else None
        if found is not None and found.status == "diverged":
            return name
    return "match"


def _helper_names(names: Sequence[str]) -> list[HelperName]:
    """The helpers in their own order; all three when none is named. Raises UsageError for an unknown name."""
    if unknown := set(names) - set(HELPERS):
        raise UsageError(f"there is no helper {sorted(unknown)[0]!r}", why=f"there are: {', '.join(HELPERS)}")
    return [helper for helper in HELPERS if not names or helper in names]
