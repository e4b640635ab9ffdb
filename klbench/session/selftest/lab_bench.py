"""A session's work on a server in which faults may be armed; its prompts change with the workload."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.experiments import configured_arguments
from klbench.engine.capture import capture
from klbench.engine.captured_work import Work
from klbench.engine.client import Keys
from klbench.engine.prompts import PromptSet
from klbench.engine.server import Server
from klbench.engine.target import Demo, LaunchOptions
from klbench.errors import ServerError, UndecidedError
from klbench.session.bench import Bench
from klbench.session.locating import server_side
from klbench.session.runner import Session
from klbench.session.selftest.plan import ServerConfiguration
from klbench.zoo import Kind


class LabBench(Bench):
    """The work of one session of a selftest; `workload` are the prompts of the next run."""

    def __init__(self, session: Session, configuration: ServerConfiguration) -> None:
        super().__init__(session)
        self.workload = PromptSet("no workload yet", ())
        self._of_station = configuration

    @property
    def server(self) -> Server:
        if self._server is None:
            raise ServerError("the server of the selftest is gone")
        return self._server

    def pass_of(self, run: int, helper: HelperName) -> int:
        return self._measured[run, helper][0]

    async def _launch(self, keys: Keys, ready_to_capture: bool) -> Server:
        target, options = self._session.start.target, self._session.start.options
        return await Server.start(
            Demo(cast(Kind, target.model)),
            LaunchOptions(
                arguments=configured_arguments(target.arguments, self._configuration),
                ready_to_capture=ready_to_capture,
                fault_lab=True,
                environment=self._of_station.environment,
                server_python=Path(options.server_python) if options.server_python else None,
            ),
            folder=self._session.folder.server,
            observe=self._events,
            keys=keys,
            launch_timeout_s=options.launch_timeout_s,
        )

    async def _prompts_for(self, _: Server) -> PromptSet:
        return self.workload

    async def clean_capture(
        self, helper: HelperName, columns: HelperColumns, number: int, folder: Path
    ) -> list[str]:
        """Traces a clean request of a measured helper; returns what is accused all the same."""
        side = server_side(self.server, self._ids(self.server))
        request = int(columns.prompt_len.argmax())
        work = Work(
            helper,
            self.workload.as_lists(),
            request,
            columns,
            self._session.start.options.max_new_tokens,
            (number,),
        )
        outcome = await capture(side, work, trace_dir=folder, numbers=False)
        shutil.rmtree(outcome.trace_dir, ignore_errors=True)
        if not outcome.alignment.proved:
            raise UndecidedError(f"the rows of {helper} cannot be paired", why=outcome.alignment.reason or "")
        return [f"{found.kind} {found.module}" for found in outcome.findings if not found.latent]
