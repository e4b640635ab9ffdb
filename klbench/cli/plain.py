"""The workbench line by line (`--plain`): for screen readers, for terminals that move no cursor, for a log.

    $ klbench --plain open 20251129-dense
    klbench · dense demo · cpu torch_native · deterministic · radix on · page 1
    ready · 32 prompts × 128 new · 3 of 3 helpers done in 0:17
    Next: locate the origin in request 23, the one under the cursor · press o
    type a command, or help
    locate 23
    capturing layers · 40 %

The same session, runner and judgments as on the screens: a line is a command by its name or its key. Nothing
is drawn and nothing is said twice; what happens is told as it happens, seldom enough to be listened to.
Leaving is a detach: the runner goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from klbench.cli import plain_words as words
from klbench.cli.progress import Progress
from klbench.cli.typed_lines import typed_lines
from klbench.errors import ExitCode, KlbenchError, UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session import link
from klbench.session.folder import SessionFolder
from klbench.session.log import LogTail
from klbench.session.reading import find_runner
from klbench.session.request import start_from_dict
from klbench.session.state import SessionState, without_runner
from klbench.tui import actions, wording
from klbench.tui.measurement import load_measurement
from klbench.tui.model import Model
from klbench.tui.origin_words import not_replayable
from klbench.tui.server_log import ServerLog
from klbench.tui.situation import Situation, can_ready
from klbench.tui.verdict_words import mappings

STEP_S = 0.25
_LIFE_STEPS = 8
"""Every how many steps a silent runner is looked for."""
_END_S = 30.0
"""How long `stop` waits for the runner to end its server."""
_MOST = 10

NAMES = {
    "status": "Where it stands: server, helpers, what is known, what to do next.",
    "requests": "The requests that differ, the worst first; a number behind it says how many.",
    "tokens": "The first tokens of a request that differ: tokens REQUEST, or tokens REQUEST 50.",
    "helper": "Look at another helper: helper match.",
    "verdict": "", "origin": "", "experiments": "", "census": "", "guide_all": "", "log": "", "commands": "",
    "run": "",
    "locate": "Name the first operator that differs: locate, locate REQUEST, locate REQUEST relaunch.",
    "take_census": "",
    "make": "Make experiments: make NAME NAME.",
    "replay": "", "report": "", "agree": "", "cancel": "", "continue": "", "start_server": "", "control": "",
    "like": "",
    "stop": "Stop the server and end the session's work.",
    "quit": "Leave; what runs goes on.",
    "help": "Every command, its key, and why one cannot be used now.",
}  # fmt: skip
"""The commands in the order of `help`; an empty text is the registry's own."""


def work_in_lines(
    *, session: Path | None, start: dict[str, Any] | None, readonly: bool, say: Callable[[str], None]
) -> int:
    """Work on a session, or on a new one that `start` describes, until the user leaves; the exit code."""
    if session is None and start is None:
        raise UsageError(
            "line by line there is no start screen",
            next="klbench --plain demo, or klbench --plain open SESSION (klbench sessions lists them)",
        )
    folder = SessionFolder(session.absolute()) if session is not None else None
    return asyncio.run(_work(folder, start, readonly, say))


async def _work(
    folder: SessionFolder | None, start: dict[str, Any] | None, readonly: bool, say: Callable[[str], None]
) -> int:
    if folder is None:
        assert start is not None
        folder = await link.start_session(start_from_dict(start))
    bench = LineBench(folder, readonly=readonly, say=say)
    with typed_lines() as typed:
        await bench.work(typed)
    return ExitCode.CONSISTENT


class LineBench:
    """One session in lines. `look` tells what is new, `obey` does what a line says."""

    def __init__(
        self,
        folder: SessionFolder,
        *,
        readonly: bool,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = Model(readonly=readonly, clock=clock)
        self.model.turn_to(folder)
        self._folder, self._say = folder, say
        self._tail, self._folded = LogTail(folder.events), SessionState()
        self._progress = Progress(say=say)
        self._told: list[str] = []
        self._shown: tuple[int, str] | None = None
        """Run and helper whose requests are spoken of."""
        self._steps = 0
        self._attachment: link.Attachment | None = None

    async def work(self, typed: asyncio.Queue[str | None]) -> None:
        """Tell what happens and do what is typed until the user leaves or the input ends."""
        self.look()
        try:
            if self.model.live and not self.model.readonly:
                await self._reported(self._attached)
            self._say_all(words.status(self.model))
            self._say("type a command, or help")
            going = True
            while going:
                try:
                    line = await asyncio.wait_for(typed.get(), STEP_S)
                except TimeoutError:
                    line = ""
                going = line is not None and await self.obey(line)
                self.look()
            if self.model.live:
                self._say(f"left; the work goes on: klbench --plain open {self._folder.name}")
        finally:
            if self._attachment is not None:
                await self._attachment.close()

    # What happens

    def look(self) -> None:
        """Read what is new, and tell it but for the first time."""
        entries, first = self._tail.drain(), self._steps == 0
        for entry in entries:
            self._folded = self._folded.apply(entry)
        model = self.model
        was_live = model.live
        if entries or self._steps % _LIFE_STEPS == 0:
            model.live = find_runner(self._folder) is not None
            model.state = self._folded if model.live else without_runner(self._folded)
        self._steps += 1
        self._load()
        if first:
            self._told = words.statement(model)
            return
        for entry in entries:
            self._say_all(self._news(entry.event))
        if was_live and not model.live:
            self._say(
                f"the runner has ended{f': {model.state.runner.ended}' if model.state.runner.ended else ''}"
            )
        if entries or model.live != was_live:
            said = words.statement(model)
            if said:
                self._say_all([line for line in said if line not in self._told])
                self._told = said

    def _news(self, event: ev.Event) -> list[str]:
        """What an event means to somebody who listens."""
        match event:
            case ev.Trouble(level="error"):
                return self._progress.lines(event) or wording.trouble(self.model.state.troubles[-1])
            case ev.ReportWritten():
                return [f"written: {self._folder.path / name}" for name in event.files]
            case ev.JobEnded():
                return [f"job {event.job} ended: {event.outcome}"]
            case _:
                return self._progress.lines(event)

    def _load(self) -> None:
        """Read the columns of helpers that have ended, and choose the worst request."""
        model = self.model
        for key, run, helper in model.wanted():
            model.loaded.add(key)
            with contextlib.suppress(KlbenchError):
                model.measurements[run.number, helper.helper] = load_measurement(
                    self._folder, run.number, helper
                )
        measured = model.measurement
        shown = (measured.run, measured.columns.helper) if measured is not None else None
        if shown != self._shown:
            self._shown, model.request = shown, None
        if measured is not None and model.request is None and measured.columns.requests:
            model.request = int(measured.divergent_first()[0])

    def _say_all(self, lines: list[str]) -> None:
        for line in filter(str.strip, lines):
            self._say(line)

    # What is typed

    async def obey(self, line: str) -> bool:
        """Do what the line says, or say why not; False where the user leaves."""
        name, *about = line.split() or [""]
        if not name:
            return True
        command = named(name)
        if command is None:
            self._say(f"there is no command {name!r}: help lists them")
            return True
        if command == "quit":
            return False
        if (why := self._why_not(command)) is not None:
            self._say(f"not now: {why}")
            return True
        try:
            done = self._views(command, about)
        except (ValueError, IndexError):
            self._say(f"{command}: {about_command(command)}")
            return True
        if done is not None:
            self._say_all(done)
            return True
        return await self._do(command, about)

    def _why_not(self, command: str) -> str | None:
        action, situation = actions.BY_ID.get(command), self._situation()
        if action is None or command == "quit":
            return None
        answer = can_ready(situation) if command == "locate" else action.enabled(situation)
        return None if answer is True else answer

    def _situation(self) -> Situation:
        """With the latest origin, which a replay is of."""
        found = self.model.state.latest_located
        findings = mappings(found.result.get("findings")) if found is not None else []
        why = not_replayable(findings[0]) if findings else ""
        return replace(self.model.situation(), findings=len(findings), not_replayable=why)

    def _views(self, command: str, about: list[str]) -> list[str] | None:
        """What a command that only shows something shows; None for the others."""
        model = self.model
        match command:
            case "help":
                return self._help()
            case "status":
                return words.status(model)
            case "verdict":
                return words.verdict(model)
            case "origin":
                found = model.located or model.state.latest_located
                return words.origin(found) if found is not None else []
            case "experiments":
                return words.experiments(model)
            case "census":
                return words.census(model)
            case "guide_all":
                return words.guide(model)
            case "like":
                return [f"in a shell: klbench run --like {self._folder.name}"]
            case "commands":
                calls = model.state.calls[-_number(about, 0) :]
                return [f"{call.line} · {call.outcome}" for call in calls] or ["nothing was run yet"]
            case "log":
                return self._log(_number(about, 0))
            case "helper":
                return self._choose(about[0])
            case "requests" | "tokens":
                measured = model.measurement
                if measured is None:
                    return ["nothing was measured yet"]
                if command == "requests":
                    return words.requests(measured, _number(about, 0))
                chosen = int(about[0]) if about else model.request
                if chosen is None or not 0 <= chosen < measured.columns.requests:
                    return [f"there is no such request: {measured.columns.requests} were measured"]
                model.request = chosen
                return words.tokens(measured, chosen, _number(about, 1))
            case _:
                return None

    def _choose(self, name: str) -> list[str]:
        names = [helper.helper for helper in self.model.helpers]
        found = [one for one in names if one.startswith(name)]
        if not found:
            return [f"there is no helper {name!r}: {', '.join(names)}"]
        self.model.chosen_helper, self.model.request = found[0], None
        self._load()
        return (
            words.requests(self.model.measurement, _MOST) if self.model.measurement is not None else found[:1]
        )

    def _log(self, most: int) -> list[str]:
        name = self.model.state.server.log
        if not name:
            return ["the server has said nothing yet"]
        try:
            lines, _ = ServerLog(self._folder.resolve(name)).read()
        except UsageError as error:
            return [error.what]
        return lines[-most:] or ["the server has said nothing yet"]

    def _help(self) -> list[str]:
        lines = []
        for name in NAMES:
            action, why = actions.BY_ID.get(name), self._why_not(name)
            key = f", or {action.shown_key}" if action is not None and "main" in action.screens else ""
            lines.append(f"{name}{key}: {about_command(name)}" + (f" Not now: {why}." if why else ""))
        return lines

    async def _do(self, command: str, about: list[str]) -> bool:
        """What changes something; False where the session's work ends with it."""
        model = self.model
        match command:
            case "continue" if not model.live:
                await self._reported(lambda: self._start(link.continue_session))
            case "start_server" if not model.live:
                await self._reported(lambda: self._start(link.start_server_again))
            case "control":
                await self._reported(lambda: self._take(over=True))
            case "stop":
                await self._send(cmd.Stop())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_S):
                        while find_runner(self._folder) is not None:  # noqa: ASYNC110 - another process
                            await asyncio.sleep(0.1)
                return False
            case _:
                try:
                    await self._send(self._command(command, about))
                except (ValueError, IndexError):
                    self._say(f"{command}: {about_command(command)}")
        return True

    def _command(self, command: str, about: list[str]) -> cmd.Command:
        match command:
            case "run":
                return cmd.Run()
            case "cancel":
                return cmd.Cancel()
            case "agree":
                return cmd.Confirm()
            case "report":
                return cmd.Report()
            case "continue":
                return cmd.Continue()
            case "start_server":
                return cmd.Relaunch()
            case "take_census":
                return cmd.Census()
            case "replay":
                return cmd.Replay()
            case "make":
                if not about:
                    raise ValueError("no name")
                return cmd.Experiment(names=about)
            case "locate":
                relaunch = "relaunch" in about
                numbers = [int(word) for word in about if word != "relaunch"]
                request = numbers[0] if numbers else self.model.request
                helper = self.model.helper.helper if request is not None else None
                return cmd.Locate(helper=helper, request=request, relaunch=relaunch)
            case _:
                raise ValueError(command)

    # The runner

    async def _send(self, command: cmd.Command) -> None:
        async def send() -> None:
            await (await self._attached()).send(command)

        await self._reported(send)

    async def _attached(self) -> link.Attachment:
        if self._attachment is None:
            self._attachment = await link.attach(self._folder)
            await self._take(over=False)
        return self._attachment

    async def _take(self, *, over: bool) -> None:
        attachment = self._attachment or await self._attached()
        try:
            await attachment.take_control(over=over)
        except UsageError as error:
            self.model.watching = True
            self._say(f"this terminal watches: {error.what}; control takes it over")
        else:
            self.model.watching = False

    async def _start(self, begin: Callable[[SessionFolder], Awaitable[str]]) -> None:
        self._say(await begin(self._folder))
        self.model.readonly = False
        await self._attached()

    async def _reported(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except KlbenchError as error:
            self._attachment = None if error.exit_code == ExitCode.NO_SERVER else self._attachment
            parts = (error.what, error.why, f"next: {error.next}" if error.next else "")
            self._say(" · ".join(part for part in parts if part))


def named(word: str) -> str | None:
    """The command that a line names: by its name or the beginning of it, or by its key on the main screen."""
    if word in NAMES:
        return word
    by_key = next((a.id for a in actions.of_screen("main") if word in map(actions.shown, a.keys)), None)
    if by_key in NAMES:
        return by_key
    near = [name for name in NAMES if name.startswith(word)] if len(word) > 1 else []
    return near[0] if len(near) == 1 else None


def about_command(name: str) -> str:
    """What a command does."""
    return NAMES[name] or actions.BY_ID[name].help


def _number(about: list[str], place: int) -> int:
    """The number at a place of what was typed, ten without. Raises ValueError."""
    return max(int(about[place]), 1) if len(about) > place else _MOST
