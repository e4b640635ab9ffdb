"""One live server of a selftest: plants a fault, lets klbench answer, judges, and sees that it is gone again.

For each case: flush, arm, run the helpers, locate, make the experiments that the verdict names, compare with
the truth, disarm, flush, and see that the helper is clean again. Nothing here knows the truth before the
answer is given: run, locate and experiment are those of an ordinary session.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from klbench.core.accuracy import MARKS, Answer, judge
from klbench.core.columns import HelperColumns, HelperName
from klbench.core.experiments import CATALOGUE
from klbench.core.kl import summarise
from klbench.engine.compositions import Composition, read_compositions
from klbench.engine.fault_control import FaultControl, Fired
from klbench.engine.prompts import PromptSet
from klbench.errors import KlbenchError, ServerError, UndecidedError
from klbench.insitu.faults_catalogue import parse_faults
from klbench.session import commands as cmd
from klbench.session.columns import load_columns
from klbench.session.documents import helper_object
from klbench.session.folder import make_session
from klbench.session.request import Options, StartRequest, Target
from klbench.session.runner import Runner, Session
from klbench.session.selftest.lab_bench import LabBench
from klbench.session.selftest.plan import Case, ServerConfiguration, Workload
from klbench.session.selftest.truth import truth_of
from klbench.session.state import RunState

_ROUNDS = 2
"""So often the experiments that the verdict names are made."""


class Lab:
    """One server while the `async with` block lasts. Raises KlbenchError where it does not start."""

    def __init__(
        self,
        model: str,
        configuration: ServerConfiguration,
        *,
        folder: Path,
        new_tokens: int,
        server_python: str | None = None,
    ) -> None:
        target = Target(kind="demo", model=model, arguments=configuration.flags)
        options = Options(max_new_tokens=new_tokens, ready_to_capture=True, server_python=server_python)
        self._start = StartRequest(target=target, options=options)
        self.model = model
        self.configuration = configuration
        self._folder = make_session(folder, *self._start.as_shown())
        self._runner = Runner(self._folder, self._start, self._make_work, attended=False)
        self._bench: LabBench | None = None

    def _make_work(self, session: Session) -> LabBench:
        self._bench = LabBench(session, self.configuration)
        return self._bench

    async def __aenter__(self) -> Lab:
        await self._runner.__aenter__()
        try:
            # The runner's own job, so that an ordinary session begins: the helpers on a first workload.
            await self._run(Workload("first", 1, 32), ["match"])
        except BaseException as error:
            await self._runner.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self._runner.__aexit__(kind, error, trace)

    @property
    def facts(self) -> dict[str, Any]:
        return self.bench.server.facts.as_dict()

    @property
    def bench(self) -> LabBench:
        assert self._bench is not None
        return self._bench

    def _faults(self) -> FaultControl:
        server = self.bench.server
        assert server.control_dir is not None
        assert server.nonce is not None
        ranks = [presence.rank for presence in server.presences if presence.rank is not None]
        return FaultControl(server.control_dir, server.nonce, ranks)

    async def _run(self, workload: Workload, helpers: list[str]) -> RunState:
        self.bench.workload = PromptSet(workload.name, tuple(map(tuple, workload.prompts())))
        await self._runner.execute(cmd.Run(helpers=helpers))
        return self._now

    @property
    def _now(self) -> RunState:
        run = self._runner.state.run
        assert run is not None
        return run

    # One case.

    async def case(self, case: Case) -> dict[str, Any]:
        """The object in `cases` of klbench.selftest/1. Raises ServerError where the server is gone."""
        began = time.monotonic()
        done: dict[str, Any] = {
            "model": self.model,
            "configuration": self.configuration.name,
            "workload": case.workload.name,
            "fault": case.fault,
            "family": case.family,
            "cannot_fire": case.cannot_fire,
            "answer": "error",
            "marks": dict.fromkeys(MARKS, "none"),
            "why": "",
            "grade": "unknown",
            "deciding": [],
            "elapsed_s": 0.0,
        }
        faults = self._faults()
        try:
            await self.bench.server.client.flush()
            await faults.arm(case.fault)
        except UndecidedError as error:
            done["why"] = f"not planted: {error.what}: {error.why}"
            return done
        try:
            done |= await self._answered(case)
        except ServerError:
            raise
        except KlbenchError as error:
            done["why"] = ": ".join(part for part in (error.what, error.why) if part)
        fired = await faults.disarm()
        done["fired"] = [_fired(entry) for entry in fired]
        _judge_firing(case, done)
        await self._clean_again(case, done)
        done["elapsed_s"] = round(time.monotonic() - began, 3)
        return done

    async def _answered(self, case: Case) -> dict[str, Any]:
        """What klbench said of the armed fault, and the marks for it."""
        run = await self._run(case.workload, [])
        measured_s = run.elapsed_s
        refusal, located = "", None
        if any(helper.status == "diverged" for helper in run.helpers):
            try:
                await self._runner.execute(cmd.Locate())
                located = self._runner.state.latest_located
            except UndecidedError as error:
                refusal = ": ".join(part for part in (error.what, error.why) if part)
            made = await self._experiments()
        else:
            made = []
        run = self._now
        columns = self._columns(run)
        place = None
        number, forwards = 0, []
        if located is not None:
            place = cast(HelperName, located.helper), located.request
            number = self.bench.pass_of(run.number, place[0])
            forwards = self._forwards(number)
            _check_carried(case, forwards)
        body: Mapping[str, Any] = located.result if located is not None else {}
        if located is not None and not body.get("findings"):
            refusal = str((body.get("alignment") or {}).get("reason") or "")
        statuses = {helper.helper: helper.status for helper in run.helpers}
        divergent: frozenset[int] = frozenset()
        if place is not None:
            divergent = frozenset(np.flatnonzero(summarise(columns[place[0]]).divergent_tokens).tolist())
        answer = Answer(
            statuses,
            run.verdict or {},
            body.get("findings", []),
            body.get("masked", []),
            refusal,
            divergent,
        )
        judged = judge(truth_of(case.fault, place, columns, forwards, number), answer)
        return {
            "answer": judged.answer,
            "marks": dict(judged.marks),
            "why": judged.why,
            "grade": judged.grade,
            "deciding": list(judged.deciding),
            "statuses": statuses,
            "conditions": list((run.verdict or {}).get("conditions") or []),
            "located": [_located(finding) for finding in answer.findings],
            "experiments": made,
            "measured_s": round(measured_s or 0.0, 3),
        }

    async def _experiments(self) -> list[list[str]]:
        """Makes what the verdict names and this server can do; returns names and outcomes."""
        made: list[list[str]] = []
        for _ in range(_ROUNDS):
            names = self._named() - {name for name, _ in made}
            if not names:
                break
            before = len(self._runner.state.experiments)
            await self._runner.execute(cmd.Experiment(names=sorted(names), max_relaunches=0))
            made += [
                [one.name, str(one.result.get("outcome"))] for one in self._runner.state.experiments[before:]
            ]
        return made

    def _named(self) -> set[str]:
        """The experiments that the verdict proposes, where it is not certain and they need no relaunch."""
        verdict = self._now.verdict or {}
        if verdict.get("grade") == "confirmed":
            return set()
        return {
            code
            for step in verdict.get("next") or ()
            if (code := str(step.get("code"))) in CATALOGUE
            and not CATALOGUE[code].relaunches
            and "not_possible" not in (step.get("values") or {})
        }

    def _columns(self, run: RunState) -> dict[HelperName, HelperColumns]:
        files = [helper.columns for helper in run.helpers if helper.columns is not None]
        return {part.helper: part for part in (load_columns(self._folder.resolve(file)) for file in files)}

    def _forwards(self, number: int) -> list[Composition]:
        server = self.bench.server
        assert server.control_dir is not None
        assert server.nonce is not None
        return read_compositions(server.control_dir / "forwards-0.jsonl", server.nonce, [number])

    async def _clean_again(self, case: Case, done: dict[str, Any]) -> None:
        """What a fault leaves in the cache must be gone: its helper reads zero again."""
        await self.bench.server.client.flush()
        dirty = [name for name, status in done.get("statuses", {}).items() if status == "diverged"]
        run = await self._run(case.workload, dirty[:1] or ["match"])
        again = [helper.helper for helper in run.helpers if helper.status == "diverged"]
        done["clean_again"] = not again
        if again:
            done["answer"] = "wrong"
            done["why"] = f"{again[0]} is not clean after the fault was disarmed; {done['why']}"
        await asyncio.to_thread(shutil.rmtree, self._folder.traces, True)

    # One clean configuration.

    async def clean(self, workload: Workload) -> dict[str, Any]:
        """The object in `clean` of klbench.selftest/1: nothing is planted, so nothing may be accused."""
        began = time.monotonic()
        done: dict[str, Any] = {
            "model": self.model,
            "configuration": self.configuration.name,
            "workload": workload.name,
            "fault": "none",
            "answer": "error",
            "why": "",
        }
        try:
            await self.bench.server.client.flush()
            run = await self._run(workload, [])
            done["helpers"] = {
                helper.helper: {
                    name: helper_object(helper).get(name)
                    for name in ("status", "reason", "requests", "hits", "tokens", "divergent_tokens")
                }
                for helper in run.helpers
            }
            accused = [helper.helper for helper in run.helpers if helper.status == "diverged"]
            failed = [helper.helper for helper in run.helpers if helper.status == "error"]
            if (run.verdict or {}).get("status") == "found":
                accused.append("the verdict")
            if not accused and not failed:
                accused = await self._accused_operators(run)
            if accused:
                done["answer"], done["why"] = "wrong", f"accused: {', '.join(accused)}"
            elif failed:
                done["why"] = f"no answer from {', '.join(failed)}"
            else:
                done["answer"] = "right"
        except ServerError:
            raise
        except KlbenchError as error:
            done["why"] = ": ".join(part for part in (error.what, error.why) if part)
        done["elapsed_s"] = round(time.monotonic() - began, 3)
        return done

    async def _accused_operators(self, run: RunState) -> list[str]:
        """Traces the longest request of each helper that compared something."""
        accused = []
        for name, columns in self._columns(run).items():
            if columns.output_len.any() and not columns.dropped[columns.prompt_len.argmax()]:
                number = self.bench.pass_of(run.number, name)
                accused += await self.bench.clean_capture(name, columns, number, self._folder.traces)
        return accused


def _check_carried(case: Case, forwards: Sequence[Composition]) -> None:
    """Raises UndecidedError where a forward of the measured run does not carry what was armed."""
    armed = tuple(planted.spelled for planted in parse_faults(case.fault))
    for forward in forwards:
        if forward.faults != armed:
            raise UndecidedError(
                f"forward {forward.number} was made with other faults than those that were armed",
                why=f"it carries {', '.join(forward.faults) or 'none'}",
            )


def _judge_firing(case: Case, done: dict[str, Any]) -> None:
    """What did not fire is no pass; what cannot fire here must say so."""
    count = min((entry["count"] for entry in done["fired"]), default=0)
    if case.cannot_fire:
        dirty = [name for name, status in done.get("statuses", {}).items() if status == "diverged"]
        right = count == 0 and not dirty
        done["marks"] = dict.fromkeys(MARKS, "none") | {"helpers": "right" if right else "wrong"}
        done["answer"] = "did_not_fire" if right else "wrong"
        done["why"] = "" if right else f"it fired {count} times; diverged: {', '.join(dirty) or 'nothing'}"
    elif count == 0:
        done["marks"] = dict.fromkeys(MARKS, "none")
        done["answer"], done["why"] = "did_not_fire", "nothing was changed: this is no pass"


def _fired(entry: Fired) -> dict[str, Any]:
    return {
        "fault": entry.fault,
        "rank": entry.rank,
        "count": entry.count,
        "first_rid": entry.first_rid,
        "first_positions": list(entry.first_positions),
    }


def _located(finding: Mapping[str, Any]) -> dict[str, Any]:
    named = (
        "kind",
        "kinds",
        "module",
        "layer",
        "request",
        "helper",
        "arm",
        "positions",
        "grade",
        "replay_M",
        "latent",
    )
    missing = next(
        (e["values"].get("missing") for e in finding["evidence"] if e["code"] == "not_confirmed"), None
    )
    return {name: finding.get(name) for name in named} | {"missing": missing}
