"""The server of a session: started or attached to, watched, started again, ended.

Invariants: a server that ends by itself is an event, at once; ours never outlives the session's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from klbench.core.experiments import AS_IT_IS, Configuration, configured_arguments
from klbench.core.text import counted
from klbench.engine.checkout import read_checkout
from klbench.engine.client import Keys
from klbench.engine.launching import LaunchError
from klbench.engine.leave import Leave
from klbench.engine.path_map import read_path_map
from klbench.engine.server import Server
from klbench.engine.target import Demo, Launch, LaunchOptions
from klbench.errors import KlbenchError, ServerError, UsageError
from klbench.paths import make_private
from klbench.session import events as ev
from klbench.session.attach_exports import attach_root
from klbench.session.beforehand import check_beforehand
from klbench.session.folder import write_atomically
from klbench.session.history import past_of
from klbench.session.runner import JobView, Session
from klbench.zoo import Kind


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

    def keep_body(self, content: bytes) -> Path | None:
        """Keeps it once: the arms of a helper send the same prompts again."""
        try:
            folder = make_private(self._session.folder.path / "calls")
            file = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.json"
            if not file.exists():
                write_atomically(file, content)
        except (OSError, UsageError):
            return None  # a full disk must not keep the call from being made
        return file

    def warning(self, what: str, why: str, next: str) -> None:
        self._session.emit(ev.Trouble(level="warning", what=what, why=why, next=next))


class Serving:
    """Owns the server of one session, if there is one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events = _ServerEvents(session)
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._configuration: Configuration = AS_IT_IS
        options = session.start.options
        self._leave = Leave.FLUSH if options.yes_flush else Leave.ASK
        """What may be done to a server that is not ours; its client sees to it."""
        if options.readonly:
            self._leave = Leave.COMPUTE

    async def launch(self, job: JobView) -> None:
        """Starts the server or attaches to it; nothing when it is ready."""
        await self._ready_server(job)

    async def _ready_server(self, job: JobView) -> Server:
        if self._configuration is not AS_IT_IS:
            await self.close()
            self._configuration = AS_IT_IS
        if self._server is None:
            await asyncio.to_thread(check_beforehand, self._session.start)
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
            job.progress(f"asking {target.url} what it is", 0, 0)
            server = await Server.attach(
                target.url,
                observe=self._events,
                keys=keys,
                attach_root=attach_root(),
                agree=lambda requests: self._may_ask(job, requests),
                paths=read_path_map(options.path_maps),
            )
            server.client.leave = self._leave
        else:
            expected_s = self._session.state.server.launch_s
            if expected_s is None:
                shown, _ = self._session.start.as_shown()
                expected_s = (await asyncio.to_thread(past_of, shown)).launch_s
            job.progress("starting the server", 0, 0, expected_s)
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

    async def _may_ask(self, job: JobView, requests: int) -> bool:
        """Whether an attached server may be sent so many requests of one token to find its plugin's folder;
        read-only nothing is captured, so they are not needed."""
        if self._session.start.options.readonly:
            return False
        if self._leave < Leave.COMPUTE:
            await job.ask(
                f"send {counted(requests, 'request')} of one token to {self._session.start.target.url}",
                "it carries klbench's plugin, or one like it, and where that writes cannot be told otherwise",
            )
        return True

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
        if server is None:
            return
        if server.owned:
            self._session.emit(ev.ServerPhase(phase="stopping", elapsed_s=0.0))
        await asyncio.shield(server.stop())
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
