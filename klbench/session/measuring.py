"""One run: the helpers one after the other, each result out as soon as it is there.

Invariants: columns are on disk before the event that names them, and a generation arm before its scoring; a
helper that fails says so and the next
one runs, unless the server is gone; however the run ends, it has an end and a verdict from what was measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from klbench.core.columns import ArmName, HelperColumns, HelperName
from klbench.core.diagnosis import diagnose
from klbench.core.exercised import what_will_be_missed
from klbench.core.kl import helper_result, not_measured
from klbench.core.text import counted
from klbench.engine.advice import advice
from klbench.engine.capture_control import RequestIds
from klbench.engine.disorder import CacheChecks
from klbench.engine.generation_arm import GenerationArm
from klbench.engine.prompts import PromptSet
from klbench.engine.server import Server
from klbench.errors import KlbenchError, ServerError
from klbench.session import events as ev
from klbench.session.arm_file import SavedArm, arm_file, save_arm
from klbench.session.columns import load_columns, save_columns
from klbench.session.continuing import kept_arms, save_prompts, saved_generation
from klbench.session.folder import write_atomically
from klbench.session.history import Past, past_of
from klbench.session.runner import JobView, Session
from klbench.session.state import RunState

CONTEXT_TOKENS = 16
"""So many tokens at the end of each prompt get their text too: what stands before the first generated one."""


class _ArmEvents:
    """Turns what the arms of one helper observe into events."""

    def __init__(self, session: Session, run: int, helper: HelperName) -> None:
        self._session = session
        self._run = run
        self._helper = helper

    def arm_started(self, arm: ArmName, requests: int, tokens: int) -> None:
        self._session.emit(
            ev.ArmStarted(run=self._run, helper=self._helper, arm=arm, requests=requests, tokens=tokens)
        )

    def arm_progress(
        self, arm: ArmName, done: int, total: int, elapsed_s: float, eta_s: float | None
    ) -> None:
        self._session.emit(
            ev.ArmProgress(
                run=self._run,
                helper=self._helper,
                arm=arm,
                done=done,
                total=total,
                elapsed_s=elapsed_s,
                eta_s=eta_s,
            )
        )

    def arm_stalled(self, arm: ArmName, silent_s: float) -> None:
        self._session.emit(
            ev.Trouble(
                level="warning",
                what=f"{self._helper}: no progress in the {arm} arm for {silent_s / 60:.0f} minutes",
                why="the server may be stuck, or its queue full of other work",
                next="look at its log; the run can be cancelled and continued later",
            )
        )

    def arm_unseen(self, arm: ArmName, why: str) -> None:
        """Says it once in a session: it lies in the server, and the next arm is no better."""
        what = "whether the server works on an arm cannot be seen"
        if any(said.what == what for said in self._session.state.troubles):
            return
        self._session.emit(
            ev.Trouble(
                level="note",
                what=what,
                why=f"{why}; seen first in the {arm} arm of {self._helper}",
                next="the arms go on until the server answers or ends; they can be cancelled",
            )
        )

    def arm_ended(self, arm: ArmName, elapsed_s: float) -> None:
        self._session.emit(ev.ArmEnded(run=self._run, helper=self._helper, arm=arm, elapsed_s=elapsed_s))


class Measurement:
    """One run on a ready server."""

    def __init__(
        self,
        session: Session,
        server: Server,
        prompts: PromptSet,
        helpers: Sequence[HelperName],
        ids: RequestIds,
        continues: RunState | None = None,
        again_of: int | None = None,
    ) -> None:
        """`helpers` are those to do: all of a new run, or what is left of the one that it continues.

        `again_of`: the run that is measured again, only to look further into it.
        """
        self.number = 1 + max((run.number for run in session.state.runs), default=0)
        self._continues = continues
        self._again_of = next((run for run in session.state.runs if run.number == again_of), None)
        if continues is not None:
            self.number = continues.number
        self._session = session
        self._server = server
        self._prompts = prompts
        self._helpers = tuple(helpers)
        self._ids = ids
        self.measured: dict[tuple[int, HelperName], tuple[int, HelperColumns]] = {}
        """By run and helper: the pass in which it ran and its columns."""
        self._results: dict[HelperName, Mapping[str, Any]] = {}
        self._columns: dict[HelperName, HelperColumns] = {}
        self._earlier: GenerationArm | None = None

    async def execute(self, job: JobView) -> None:
        """Runs the helpers. Raises the error of a server that is gone; other errors are results."""
        began = time.monotonic()
        earlier_s = self._continue() if self._continues is not None else self._start()
        cancelled = False
        checks = CacheChecks(self._server.log)
        try:
            target, _ = self._session.start.as_shown()
            past = await asyncio.to_thread(past_of, target)
            for done, helper in enumerate(self._helpers):
                job.progress(helper, done, len(self._helpers), self._expected_s(past, self._helpers[done:]))
                await self._helper(helper)
                self._say_what_was_found(checks)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            # A check is made when the server has become idle: the last one's word may come late.
            self._say_what_was_found(checks)
            verdict = diagnose(self._results, self._columns, self._server.facts.as_dict())
            elapsed_s = earlier_s + time.monotonic() - began
            self._session.emit(
                ev.RunEnded(run=self.number, verdict=verdict, elapsed_s=elapsed_s, cancelled=cancelled)
            )

    def _expected_s(self, past: Past, helpers: Sequence[HelperName]) -> float | None:
        """What these helpers should take, by what earlier sessions took here."""
        prompts = self._prompts.prompts
        new_tokens = self._session.start.options.max_new_tokens
        return past.run_s(helpers, sum(map(len, prompts)), len(prompts), new_tokens)

    def _start(self) -> float:
        _, options = self._session.start.as_shown()
        if self._again_of is not None:
            self._take_over(self._again_of)
        self._session.emit(
            ev.RunStarted(
                run=self.number,
                helpers=list(self._helpers),
                prompts=self._prompts.as_dict(),
                options=options,
                prompts_file=save_prompts(self._session.folder, self._prompts),
                again_of=self._again_of.number if self._again_of is not None else None,
                not_exercised=self._will_miss(self._helpers),
            )
        )
        return 0.0

    def _will_miss(self, helpers: Sequence[str]) -> list[dict[str, Any]]:
        """What `helpers` will not put to the test with these prompts on this server."""
        missed = what_will_be_missed(
            [len(prompt) for prompt in self._prompts.prompts],
            self._server.facts.as_dict(),
            max_new_tokens=self._session.start.options.max_new_tokens,
            helpers=helpers,
        )
        return [dataclasses.asdict(item) for item in missed]

    def _continue(self) -> float:
        """Takes up the run where it was interrupted; returns the seconds that its ended helpers took."""
        assert self._continues is not None
        run, folder = self._continues, self._session.folder
        first = self._helpers[0]
        self._earlier, differing = saved_generation(folder, run, first, self._made_on())
        if differing:
            names = ", ".join(differing)
            self._session.emit(
                ev.Trouble(
                    level="note",
                    what=f"the generation arm of {first} is repeated",
                    why=f"the server is not the one it ran on: {names} differ",
                )
            )
        kept = kept_arms(first) if self._earlier is not None else []
        self._session.emit(
            ev.RunContinued(
                run=self.number,
                helpers=list(self._helpers),
                kept=list(kept),
                not_exercised=self._will_miss([helper.helper for helper in run.helpers]),
            )
        )
        return self._take_over(run)

    def _take_over(self, run: RunState) -> float:
        """Takes the helpers of the run that are not measured here as they are; returns the seconds that they
        took."""
        elapsed_s, folder = 0.0, self._session.folder
        for helper in run.helpers:
            if helper.helper in self._helpers or helper.result is None:
                continue
            elapsed_s += helper.elapsed_s
            name = cast(HelperName, helper.helper)
            self._results[name] = helper.result
            if helper.columns is not None:
                try:
                    self._columns[name] = load_columns(folder.resolve(helper.columns))
                except KlbenchError as error:
                    self._session.emit(ev.Trouble(level="warning", what=error.what, why=error.why))
        return elapsed_s

    def _made_on(self) -> dict[str, Any]:
        """The server in everything that changes numbers, its edited files too."""
        code = self._session.state.server.code
        changed = dict(code.changed) if code is not None else None
        return msgspec.json.decode(
            msgspec.json.encode(self._server.facts.as_dict() | {"code": changed}), type=dict[str, Any]
        )

    async def _helper(self, helper: HelperName) -> None:
        options = self._session.start.options
        if (why_not := self._server.why_not(helper)) is not None:
            self._ended(helper, self._without_numbers("not_run", why_not), None, 0.0)
            return
        began = time.monotonic()
        earlier, self._earlier = self._earlier, None
        kept_file = arm_file(self._session.folder.runs, self.number, helper)
        made_on = self._made_on()

        def keep(arm: GenerationArm) -> None:
            save_arm(kept_file, SavedArm(arm, self._prompts.sha256, made_on))

        try:
            columns = await self._server.run_helper(
                helper,
                self._prompts.as_lists(),
                max_new_tokens=options.max_new_tokens,
                rids=self._ids.next_pass(),
                observe=_ArmEvents(self._session, self.number, helper),
                earlier=earlier,
                keep=keep,
                flush=not options.readonly,
            )
        except KlbenchError as error:
            reason = " · ".join(part for part in (error.what, error.why) if part)
            self._ended(helper, self._without_numbers("error", reason), None, time.monotonic() - began)
            if isinstance(error, ServerError):
                raise
            self._session.emit(
                ev.Trouble(level="error", what=f"{helper}: {error.what}", why=error.why, next=error.next)
            )
            return
        self._say_what_disturbed(helper)
        elapsed_s = time.monotonic() - began
        file = self._session.folder.runs / f"{self.number}-{helper}.npz"
        save_columns(file, columns)
        self._columns[helper] = columns
        if earlier is None:
            # A generation arm of an earlier server cannot be compared with what this one would capture.
            self.measured[self.number, helper] = self._ids.latest_pass, columns
        result = helper_result(
            columns,
            threshold_nats=options.threshold,
            max_new_tokens=options.max_new_tokens,
            page_size=self._server.facts.page_size,
        )
        if retracted := sorted(self._server.retracted_requests):
            result["retracted"] = retracted
        self._ended(helper, result, self._session.folder.relative(file), elapsed_s)
        kept_file.unlink(missing_ok=True)
        await self._texts(helper, columns)

    def _say_what_disturbed(self, helper: HelperName) -> None:
        """Warns of what makes a helper's arms other than they were meant."""
        if foreign := self._server.foreign_requests:
            self._warn(
                f"{helper}: {counted(foreign, 'request')} of others ran on this server",
                "they shared batches with ours, which can change bits and spoils a comparison of runs",
                "run again when nobody else uses the server",
            )
        if retracted := sorted(self._server.retracted_requests):
            shown = ", ".join(map(str, retracted[:8])) + (", ..." if len(retracted) > 8 else "")
            self._warn(
                f"{helper}: {counted(len(retracted), 'request was', 'requests were')} retracted and computed "
                f"again: {shown}",
                "the K/V pool was full; rows that were computed twice were extended, not decoded",
                "use fewer --samples, or a larger pool: --max-total-tokens after --",
            )

    def _say_what_was_found(self, checks: CacheChecks) -> None:
        """Warns of what sglang's own check of its cache found, which its log alone tells."""
        if (line := checks.news()) is not None:
            self._warn("sglang's own check found its cache in disorder", line[:300], advice(line) or "")

    def _warn(self, what: str, why: str, next: str) -> None:
        self._session.emit(ev.Trouble(level="warning", what=what, why=why, next=next))

    def _without_numbers(self, status: str, reason: str) -> dict[str, Any]:
        return not_measured(
            status,
            reason,
            requests=len(self._prompts.prompts),
            threshold_nats=self._session.start.options.threshold,
        )

    def _ended(
        self, helper: HelperName, result: Mapping[str, Any], columns: str | None, elapsed_s: float
    ) -> None:
        self._results[helper] = result
        self._session.emit(
            ev.HelperEnded(
                run=self.number, helper=helper, result=dict(result), columns=columns, elapsed_s=elapsed_s
            )
        )

    async def _texts(self, helper: HelperName, columns: HelperColumns) -> None:
        """Asks for the tokens' text, between two measurements; without it tokens show as ids."""
        if self._server.facts.tokenizer is False:
            return
        ids = _shown_ids(columns)
        try:
            texts = await self._server.client.detokenize([[token] for token in ids])
        except KlbenchError as error:
            self._session.emit(
                ev.Trouble(level="warning", what="tokens show as numbers", why=f"{error.what}: {error.why}")
            )
            return
        file = self._session.folder.runs / f"{self.number}-{helper}-texts.json"
        table = {str(token): text for token, text in zip(ids, texts, strict=True)}
        write_atomically(file, msgspec.json.encode(table))
        self._session.emit(
            ev.TokenTexts(run=self.number, helper=helper, file=self._session.folder.relative(file))
        )


def _shown_ids(columns: HelperColumns) -> list[int]:
    """The different ids of the generated tokens and of the ends of the prompts."""
    ends = [
        columns.prompt_ids[max(int(start), int(end) - CONTEXT_TOKENS) : int(end)]
        for start, end in zip(columns.prompt_start[:-1], columns.prompt_start[1:], strict=True)
    ]
    return [int(token) for token in np.unique(np.concatenate([columns.token_id, *ends]))]
