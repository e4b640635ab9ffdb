"""The runner's work on the real engine: launch, run, locate, report.

Invariants: every fact goes out as an event before anything else happens with it; a helper's columns are on
disk before the event that names them; whatever ends a job early, its run gets an end and a verdict from what
was measured; an attached server is never flushed before its user agreed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.experiments import Configuration
from klbench.engine.capture_control import RequestIds
from klbench.engine.prompts import PromptSet, check_fits, load_prompts
from klbench.engine.server import Server
from klbench.errors import UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.census import census
from klbench.session.continuing import check_same_prompts, interrupted, recorded_prompts
from klbench.session.experimenting import (
    ExperimentBench,
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
from klbench.session.report import FORMATS, write_report
from klbench.session.runner import JobView, Session
from klbench.session.serving import Serving
from klbench.session.state import RunState


def make_work(session: Session) -> Bench:
    """What a runner calls to get its work."""
    return Bench(session)


class Bench(Serving):
    """The work of one session on its server; see runner.Work."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._request_ids: RequestIds | None = None
        self._measured: dict[tuple[int, HelperName], tuple[int, HelperColumns]] = {}
        """What was measured on the server at hand: by run and helper, the pass and the columns."""
        self._prompts: PromptSet | None = None
        self._agreed = session.start.options.yes_flush

    async def close(self) -> None:
        """Ends the server, however it stands, and forgets what was only known of it."""
        self._request_ids = None
        self._measured.clear()
        await super().close()

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
        """Writes the report, one file of each format."""
        job.progress("writing the report", 0, len(FORMATS))
        files = await asyncio.to_thread(write_report, self._session.folder, self._session.state)
        folder = self._session.folder
        self._session.emit(ev.ReportWritten(files=[folder.relative(file) for file in files]))


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
