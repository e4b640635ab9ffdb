"""The runner's work on the real engine: launch, run, locate, report.

Invariants: every fact goes out as an event before anything else happens with it; a helper's columns are on
disk before the event that names them; whatever ends a job early, its run gets an end and a verdict from what
was measured; nothing is computed or flushed on an attached server before its user agreed (engine/leave.py).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.experiments import CATALOGUE, Configuration, base_name
from klbench.core.text import counted
from klbench.engine.capture_control import Backend, RequestIds
from klbench.engine.captured_work import ServerSide
from klbench.engine.dump_process import DumpProcess, KeptReader
from klbench.engine.leave import Leave
from klbench.engine.prompts import PromptSet, check_fits, load_prompts, scoring_bytes
from klbench.engine.server import Server
from klbench.errors import UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.attached_dumper import dumper_side
from klbench.session.census import census
from klbench.session.continuing import check_same_prompts, recorded_prompts
from klbench.session.experimenting import (
    ExperimentBench,
    judge_again,
    known_experiments,
    make_experiments,
)
from klbench.session.exporting import finding_of
from klbench.session.interruption import interrupted
from klbench.session.locating import (
    Chosen,
    check_can_capture,
    choose,
    dump_process,
    server_side,
    trace_and_locate,
)
from klbench.session.measuring import Measurement
from klbench.session.replayable import check_can_replay
from klbench.session.replaying import located_to_replay, replay_finding
from klbench.session.report import FORMATS, write_report
from klbench.session.runner import JobView, Session
from klbench.session.serving import Serving
from klbench.session.state import RunState

_AS_IT_WAS = "started again as it was, with CUDA graphs: the state between its forwards is looked at"

_LARGE_LOGITS_BYTES = 2 << 30
_LOCATED_BY_PASSES = 4
"""What locating does to a server, about: the helper measured and captured twice, and forwards of its own."""


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
        self._reader: KeptReader | None = None
        """Reads the dumps of the server at hand, from one capture to the next."""
        self._run_of_this_code: int | None = None
        """The latest run that was measured here, unless somebody had the server started again since: then
        what it runs may have been edited."""

    async def close(self) -> None:
        """Ends the server, however it stands, and forgets what was only known of it."""
        self._request_ids = None
        self._measured.clear()
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                await reader.end()
        finally:
            await super().close()

    async def relaunch(self, job: JobView, ready_to_capture: bool) -> None:
        """As asked for by the user, who may have edited the code that it runs."""
        self._run_of_this_code = None
        await super().relaunch(job, ready_to_capture)

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
        await self._measure(job, server, prompts, _helper_names(found.left), found.run)

    async def _measure(
        self,
        job: JobView,
        server: Server,
        prompts: PromptSet,
        helpers: Sequence[HelperName],
        continues: RunState | None = None,
        again_of: int | None = None,
    ) -> None:
        server.check_comparable()
        check_fits(
            map(len, prompts.prompts),
            helpers,
            self._session.start.options.max_new_tokens,
            server.facts.context_length,
        )
        self._say_what_scoring_holds(server, prompts)
        await self._agree_to_flush(job, server, helpers, prompts)
        measurement = Measurement(
            self._session, server, prompts, helpers, self._ids(server), continues, again_of
        )
        self._run_of_this_code = measurement.number
        try:
            await measurement.execute(job)
        finally:
            self._remember(measurement.measured)
            if again_of is not None:
                judge_again(self._session)

    def _say_what_scoring_holds(self, server: Server, prompts: PromptSet) -> None:
        facts = server.facts
        held = scoring_bytes(
            prompts.prompts,
            self._session.start.options.max_new_tokens,
            vocab_size=facts.vocab_size,
            prefill_tokens=facts.chunked_prefill_size,
        )
        if held is not None and held > _LARGE_LOGITS_BYTES:
            self._session.emit(
                ev.Trouble(
                    level="note",
                    what=f"scoring holds up to {held / (1 << 30):.1f} GiB of logits beside the model",
                    why="the pool for K/V was sized without them",
                    next="should the server run out of memory: a smaller --chunked-prefill-size or "
                    "--mem-fraction-static after --, or fewer --prompt-tokens",
                )
            )

    def _remember(self, measured: Mapping[tuple[int, HelperName], tuple[int, HelperColumns]]) -> None:
        """Keeps the latest run's columns at hand: nothing asks for those of an earlier one."""
        known = {**self._measured, **measured}
        latest = max((run for run, _ in known), default=0)
        self._measured = {key: kept for key, kept in known.items() if key[0] == latest}

    async def _prompts_for(self, server: Server) -> PromptSet:
        """The session's prompts, the same for every run; read-only, seeded ones that the server never saw."""
        if self._prompts is None:
            options = self._session.start.options
            seed = options.seed if not options.readonly else secrets.randbelow(1 << 31)
            self._prompts = await load_prompts(
                server,
                options.prompts,
                samples=options.samples,
                prompt_tokens=options.prompt_tokens,
                seed=seed,
            )
            if options.readonly and options.prompts is None:
                note = f"read-only: prompts of a fresh seed ({seed}), because the cache is not flushed"
                self._session.emit(ev.Trouble(level="note", what=note))
            for note in self._prompts.notes:
                self._session.emit(ev.Trouble(level="note", what=note))
        return self._prompts

    def _has_leave(self, server: Server, needed: Leave) -> bool:
        """Whether the user of the server need not be asked: it is ours, or was asked in this session."""
        return server.owned or self._leave >= needed or self._session.start.options.readonly

    async def _agree(self, job: JobView, server: Server, needed: Leave, what: str, harm: str) -> None:
        """Says what will be done to a server that is not ours, and waits until its user agrees. Every job
        begins with it, whichever is the first."""
        load = await server.client.load()
        busy = (
            f"{counted(load.running, 'request runs', 'requests run')} on it and "
            f"{counted(load.queued, 'waits', 'wait')}"
            if load is not None
            else "it does not say how busy it is"
        )
        await job.ask(what, f"{busy}; {harm}")
        self._leave = server.client.leave = needed

    async def _agree_to_flush(
        self, job: JobView, server: Server, helpers: Sequence[HelperName], prompts: PromptSet
    ) -> None:
        """Asks for leave to run the arms of `helpers`, each as often as it stands there."""
        if self._has_leave(server, Leave.FLUSH):
            return
        generations = len(helpers) + helpers.count("decode_cache_hit")
        new_tokens = self._session.start.options.max_new_tokens * len(prompts.prompts)
        what = (
            f"flush the cache of {server.url} about {2 * len(helpers)} times and generate about "
            f"{new_tokens * generations} tokens on it"
        )
        harm = "its other users lose their cached prefixes"
        await self._agree(job, server, Leave.FLUSH, what, harm)

    async def _agree_to_replay(self, job: JobView, server: Server) -> None:
        """Asks for leave to call operators again in forwards of the server."""
        if self._has_leave(server, Leave.COMPUTE):
            return
        what = f"send prompts to {server.url} and call operators of its model again while they are computed"
        await self._agree(job, server, Leave.COMPUTE, what, "other requests wait in the meantime")

    def _ids(self, server: Server) -> RequestIds:
        """The request ids of this server, by which the plugin knows our requests."""
        if self._request_ids is None:
            self._request_ids = RequestIds(server.nonce or secrets.token_hex(4))
            if not server.owned:
                # It outlives this session, and remembers the passes of earlier ones by their numbers.
                self._request_ids.latest_pass = int(time.time()) % 900_000_000
        return self._request_ids

    def _refuse_readonly(self, what: str) -> None:
        if self._session.start.options.readonly:
            raise UsageError(
                f"{what} is not done on a server that is attached read-only",
                why="it arms the server's hooks, flushes its cache or starts it again",
                next="attach without --readonly, or launch a server of your own with --launch",
            )

    async def locate(self, job: JobView, helper: str | None, request: int | None, relaunch: bool) -> None:
        """Locates the origin of a divergence of the latest run.

        A server that cannot be captured as it runs is started again where `relaunch` allows it; whatever was
        not measured on the server at hand is measured again first. A divergence that lives only with CUDA
        graphs is looked for in the state alone, on the server as it was.
        """
        self._refuse_readonly("locating")
        chosen = choose(self._session.state, helper, request)
        before = await self._ready_server(job)
        server, side, backend = await self._side(job, relaunch)
        prompts = await self._prompts_for(server)
        await self._agree_to_flush(job, server, [chosen.helper] * _LOCATED_BY_PASSES, prompts)
        try:
            chosen = await self._measured_here(job, server, prompts, chosen, request)
        except UndecidedError as gone:
            if server is before or before.ready_to_capture:
                raise
            self._session.emit(ev.Trouble(level="note", what=gone.what, why=gone.why, next=_AS_IT_WAS))
            await super().relaunch(job, False)
            server = await self._ready_server(job)
            side, backend = await self._side_of(server), "state"
            chosen = await self._measured_here(job, server, prompts, chosen, request)
        measured_pass, columns = self._measured[chosen.run, chosen.helper]
        await trace_and_locate(
            self._session, job, side, backend, chosen, columns, measured_pass, prompts.as_lists()
        )
        judge_again(self._session)

    async def _measured_here(
        self, job: JobView, server: Server, prompts: PromptSet, chosen: Chosen, request: int | None
    ) -> Chosen:
        """The same choice as measured on this server. Raises UndecidedError when the divergence went away."""
        if (chosen.run, chosen.helper) in self._measured:
            return chosen
        await self._measure(job, server, prompts, [chosen.helper], again_of=self._run_of_this_code)
        return self._still_there(chosen, request)

    async def _side(self, job: JobView, relaunch: bool) -> tuple[Server, ServerSide, Backend]:
        """A server that can be captured, and by which back end: the one asked for, else digests, else its own
        dumper; the state alone where it is not ours and replays CUDA graphs. Raises UndecidedError where the
        server gives none of them."""
        asked = self._session.start.options.backend
        server = await self._ready_server(job)
        if not server.owned and asked != "digests" and (server.control_dir is None or asked == "dumper"):
            side = await dumper_side(self._session, server, self._ids(server), self._kept)
            if side is not None:
                return server, side, "dumper"
        graphs_alone = server.control_dir is not None and not server.ready_to_capture and not server.owned
        if not (graphs_alone and asked is None):
            server = await self._capturing_server(job, relaunch)
        side = await self._side_of(server)
        if graphs_alone and asked is None:
            return server, side, "state"
        # It loads torch while the arms are repeated.
        if self._reader is not None:
            await self._reader.begin()
        return server, side, "dumper" if asked == "dumper" else "digest"

    async def _side_of(self, server: Server) -> ServerSide:
        process = await dump_process(server, self._session.start.options.server_python)
        return server_side(server, self._ids(server), self._kept(process))

    def _kept(self, process: DumpProcess) -> KeptReader:
        """The reader of the server at hand: the first one stays until the server is left."""
        if self._reader is None:
            self._reader = KeptReader(process)
        return self._reader

    async def _capturing_server(self, job: JobView, relaunch: bool) -> Server:
        """A server whose operators can be seen; started again for it where `relaunch` allows that."""
        server = await self._ready_server(job)
        asked = self._session.start.options.backend
        try:
            check_can_capture(server, self._session.state.server.launch_s, asked)
        except UndecidedError as error:
            if not (relaunch and server.owned):
                raise
            self._session.emit(ev.Trouble(level="note", what=error.what, why=error.why, next=error.next))
            await super().relaunch(job, True)
            server = await self._ready_server(job)
            check_can_capture(server, self._session.state.server.launch_s, asked)
        return server

    async def census(self, job: JobView, relaunch: bool) -> None:
        """Replays the model's operators on the rows of one of the session's prompts."""
        self._refuse_readonly("a census")
        server = await self._capturing_server(job, relaunch)
        prompts = await self._prompts_for(server)
        await self._agree_to_replay(job, server)
        await census(self._session, job, await self._side_of(server), prompts.as_lists())

    async def replay(self, job: JobView, locate: int | None, finding: int) -> None:
        """Calls a located operator again alone; a relaunch is not made for it."""
        located = located_to_replay(self._session.state, locate)
        check_can_replay(finding_of(located, finding))
        server = await self._capturing_server(job, False)
        await self._agree_to_replay(job, server)
        side = await self._side_of(server)
        await replay_finding(self._session, job, side, located, finding)

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
        self._refuse_readonly("an experiment")
        known_experiments(names)
        server = await self._ready_server(job)
        prompts = await self._prompts_for(server)
        run = self._session.state.run
        chosen = _helper_to_try(run, helper)
        made = [CATALOGUE[base_name(name)] for name in names]
        passes = 1 + sum(one.passes for one in made if not one.relaunches)
        await self._agree_to_flush(job, server, [chosen] * passes, prompts)
        if run is None or (run.number, chosen) not in self._measured:
            await self._measure(job, server, prompts, [chosen], again_of=self._run_of_this_code)
            run = self._session.state.run
        assert run is not None
        if (run.number, chosen) not in self._measured:
            raise UndecidedError(
                f"{chosen} was not measured on this server", next="run the helpers, or choose another"
            )
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
        eager = self._session.start.options.ready_to_capture and not configuration.expect.get("cuda_graphs")
        self._server = await self._start(job, eager)
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
