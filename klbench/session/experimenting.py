"""Experiments of a session: the plan, its passes, each outcome as an event, and the verdict after them.

Invariants: what was not agreed to is not launched; each configuration is started once and what is in force is
read back; an experiment that fails says why and the next one is made; the verdict is judged again from the
columns on disk, so it never rests on what nobody can see.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.diagnosis import diagnose
from klbench.core.experiments import (
    AS_IT_IS,
    CATALOGUE,
    NOT_COMPARABLE,
    NOT_POSSIBLE,
    RELAUNCH_ASKS_S,
    Configuration,
    Plan,
    Step,
    base_name,
    make_plan,
    quantised_kv,
)
from klbench.core.kl import summarise
from klbench.core.padding import (
    UNREACHABLE,
    PaddedPass,
    PadTarget,
    pads_to,
    parse_target,
    read_pad,
    residue_beside,
    striking_target,
)
from klbench.core.passes import (
    Outcome,
    meaning,
    read_alone,
    read_equal_m,
    read_repeats,
    read_toggle,
    read_wide_restore,
)
from klbench.engine.arms import Widen
from klbench.engine.capture_control import RequestIds
from klbench.engine.experiments import WIDE_ROWS, Pass, Passes, composed_equally, most_alike
from klbench.engine.server import Server
from klbench.errors import ExitCode, KlbenchError, UndecidedError, UsageError
from klbench.session import events as ev
from klbench.session.columns import load_columns
from klbench.session.documents import header
from klbench.session.folder import SessionFolder
from klbench.session.locating import ArmsAsProgress
from klbench.session.runner import JobView, Session
from klbench.session.state import RunState, SessionState

EXPERIMENT_SCHEMA = "klbench.experiment/1"
_PRESENT_INFO = ("mamba_radix_cache_strategy",)
_MOST_TIMES = 3
"""A busy machine may put the batches of every pass together otherwise: so many times the planned passes are
made before that is the answer."""


@dataclass(frozen=True, slots=True)
class ExperimentBench:
    """What experiments need of the session's work: our server in another configuration, ids of its passes."""

    reconfigure: Callable[[Configuration], Awaitable[Server]]
    ids: Callable[[Server], RequestIds]


def known_experiments(names: Sequence[str]) -> tuple[str, ...]:
    """The names, once each; `pad` may name its residue. Raises UsageError for one that there is not."""
    unknown = [name for name in names if base_name(name) not in CATALOGUE]
    if unknown or not names:
        raise UsageError(
            f"there is no experiment {unknown[0]!r}" if unknown else "which experiment?",
            why=f"there are: {', '.join(CATALOGUE)}",
        )
    _chosen_target(names)
    return tuple(dict.fromkeys(names))


def _chosen_target(names: Sequence[str]) -> PadTarget | None:
    """The residue that `pad:QUANTITY%MODULUS=REST` names. Raises UsageError."""
    chosen = [name for name in dict.fromkeys(names) if ":" in name]
    if not chosen:
        return None
    name, _, parameter = chosen[-1].partition(":")
    if name != "pad" or len(chosen) > 1 or "pad" in names:
        why = "only pad has a parameter, and is made with one residue at a time"
        raise UsageError(f"cannot make {', '.join(chosen)}", why=why, next="pad:cached_tokens%8=3")
    try:
        return parse_target(parameter)
    except ValueError as error:
        why, example = str(error), "pad:cached_tokens%8=3"
        raise UsageError(f"cannot make {chosen[-1]}", why=why, next=f"for example {example}") from error


async def make_experiments(
    session: Session,
    job: JobView,
    server: Server,
    names: Sequence[str],
    helper: HelperName,
    prompts: list[list[int]],
    measured: tuple[int, HelperColumns],
    bench: ExperimentBench,
    *,
    pass_s: float,
    max_relaunches: int | None,
) -> None:
    """Makes the experiments of one helper. Raises UsageError where their relaunches were not agreed to."""
    facts = seen_of(server)
    launch_s = server.launch_s if server.owned else None
    target = _chosen_target(known_experiments(names))
    names = tuple(base_name(name) for name in names)
    ruled_out: dict[str, str] = {}
    if not server.owned:
        reason = "klbench is attached to this server and cannot start it again"
        ruled_out = {name: reason for name in names if CATALOGUE[name].relaunches}
    if "pad" in names and target is None:
        target = striking_target(measured[1], summarise(measured[1]), facts)
        if target is None:
            ruled_out["pad"] = "no residue of this run is striking: name one, pad:cached_tokens%8=3"
    plan = make_plan(names, facts, helper=helper, launch_s=launch_s, pass_s=pass_s, ruled_out=ruled_out)
    if target is not None and "pad" not in plan.impossible:
        beside = residue_beside(measured[1], summarise(measured[1]), target)
        plan = replace(plan, predictions={"pad": target.prediction(beside)})
    session.emit(ev.ExperimentsPlanned(helper=helper, plan=plan.as_dict()))
    await _agree(job, plan, launch_s, max_relaunches)
    for name, reason in plan.impossible.items():
        _say(session, Outcome(name, NOT_POSSIBLE, f"not possible here: {reason}", {}), helper, 0.0)
    work = _Work(session, job, server, helper, prompts, bench, target)
    try:
        await work.make(plan, measured)
    finally:
        # Cancelled in the middle, the verdict still knows what was made until then.
        judge_again(session)


async def _agree(job: JobView, plan: Plan, launch_s: float | None, max_relaunches: int | None) -> None:
    if not plan.launches:
        return
    takes_s = plan.launches * (launch_s or 0.0)
    if max_relaunches is not None and plan.launches > max_relaunches:
        raise UsageError(
            f"the plan needs {plan.launches} relaunches of the server, about {takes_s:.0f} s",
            why=f"--max-relaunches is {max_relaunches}",
            next=f"allow them: --max-relaunches {plan.launches}",
        )
    if max_relaunches is None and takes_s > RELAUNCH_ASKS_S:
        await job.ask(
            f"start the server again {plan.launches} times, about {takes_s:.0f} s",
            f"a launch took {launch_s or 0:.0f} s",
            agree_with=f"--max-relaunches {plan.launches}",
        )


class _Work:
    """The passes of one plan."""

    def __init__(
        self,
        session: Session,
        job: JobView,
        server: Server,
        helper: HelperName,
        prompts: list[list[int]],
        bench: ExperimentBench,
        target: PadTarget | None,
    ) -> None:
        self._target = target
        self._session = session
        self._job = job
        self._server = server
        self._helper = helper
        self._prompts = prompts
        self._bench = bench

    async def make(self, plan: Plan, measured: tuple[int, HelperColumns]) -> None:
        number, columns = measured
        base = self._passes(self._server).of_measured(columns, number)
        configuration = AS_IT_IS
        toggles: dict[str, list[Outcome]] = {}
        left = {name: sum(s.experiment == name for s in plan.steps) for name in CATALOGUE}
        for done, step in enumerate(plan.steps):
            self._job.progress(f"{step.experiment}, server {step.configuration.name}", done, len(plan.steps))
            began = time.monotonic()
            try:
                if step.configuration.name != configuration.name:
                    self._server = await self._bench.reconfigure(step.configuration)
                    configuration = step.configuration
                outcome = await self._step(step, base)
            except KlbenchError as error:
                # A server that cannot start like this is an answer; one that died ends the job.
                text = " · ".join(part for part in (error.what, error.why) if part)
                outcome = Outcome(step.experiment, NOT_COMPARABLE, text, {"error": error.as_dict()})
            left[step.experiment] -= 1
            if not CATALOGUE[step.experiment].relaunches:
                _say(self._session, outcome, self._helper, time.monotonic() - began)
                continue
            toggles.setdefault(step.experiment, []).append(outcome)
            if not left[step.experiment]:
                _say(
                    self._session, _together(toggles[step.experiment]), self._helper, time.monotonic() - began
                )

    def _passes(self, server: Server) -> Passes:
        return Passes(
            server,
            self._bench.ids(server),
            max_new_tokens=self._session.start.options.max_new_tokens,
            observe=ArmsAsProgress(self._job),
        )

    async def _step(self, step: Step, base: Pass) -> Outcome:
        passes = self._passes(self._server)
        match step.experiment:
            case "repeats":
                return await self._repeats(passes, base, step.passes)
            case "alone":
                request = _first_divergent(base.columns)
                alone = await passes.helper(self._helper, [self._prompts[request]])
                return read_alone(base.columns, request, alone.columns)
            case "wide_restore":
                widen = Widen(base.columns.cached_generation.tolist(), WIDE_ROWS)
                wide = await passes.helper(self._helper, self._prompts, widen=widen)
                return read_wide_restore(base.columns, wide.columns)
            case "equal_m":
                return read_equal_m(await passes.equal_rows(base.columns))
            case "pad":
                assert self._target is not None
                return await self._pad(passes, base.columns, self._target)
        changed = await passes.helper(self._helper, self._prompts)
        return read_toggle(
            step.experiment,
            base.columns,
            changed.columns,
            setting=step.configuration.name,
            asked=step.configuration.expect,
            in_force=seen_of(self._server),
            composed_equally=composed_equally(base, changed),
        )

    async def _repeats(self, passes: Passes, base: Pass, planned: int) -> Outcome:
        """The planned passes; more of them while no two had the same batches, where batches are seen."""
        made = [base]
        while len(made) <= planned or (len(made) <= _MOST_TIMES * planned and _none_alike(made)):
            made.append(await passes.helper(self._helper, self._prompts))
        first = most_alike(made)
        others = [part for part in made if part is not first]
        equally = [composed_equally(first, part) for part in others]
        return read_repeats(first.columns, [part.columns for part in others], equally)

    async def _pad(self, passes: Passes, base: HelperColumns, target: PadTarget) -> Outcome:
        """All prompts padded to the residue, then to the one beside it."""
        beside = residue_beside(base, summarise(base), target)
        made = [await self._padded(passes, base, target, residue) for residue in (target.residue, beside)]
        return read_pad(target, *made)

    async def _padded(
        self, passes: Passes, base: HelperColumns, target: PadTarget, residue: int
    ) -> PaddedPass:
        """One pass with every prompt followed by as many of its own tokens as bring it to the residue."""
        facts, new_tokens = self._server.facts, self._session.start.options.max_new_tokens
        longest = facts.context_length - new_tokens if facts.context_length else None
        pads = pads_to(base, target, residue, page_size=facts.page_size or 1, longest=longest)
        prompts = [
            [*prompt, *itertools.islice(itertools.cycle(prompt), max(int(pad), 0))]
            for prompt, pad in zip(self._prompts, pads, strict=True)
        ]
        made = await passes.helper(self._helper, prompts)
        return PaddedPass(made.columns, residue, np.asarray(pads != UNREACHABLE))


def _none_alike(made: Sequence[Pass]) -> bool:
    """Whether the batches of each pass were seen, and no two passes had the same."""
    first = most_alike(made)
    alike = any(composed_equally(first, part) for part in made if part is not first)
    return not alike and all(part.shapes is not None for part in made)


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of several settings: the one that says most, and all of them in its text."""
    order = ("moved", "vanished", "differs", "same_bits", "not_comparable", "no_effect")
    first = min(outcomes, key=lambda o: order.index(o.outcome) if o.outcome in order else len(order))
    equally = all(outcome.values.get("composed_equally", True) for outcome in outcomes)
    values: dict[str, Any] = {
        "settings": [outcome.as_dict() for outcome in outcomes],
        "composed_equally": equally,
    }
    return Outcome(first.name, first.outcome, "; ".join(outcome.text for outcome in outcomes), values)


def _first_divergent(columns: HelperColumns) -> int:
    dirty = summarise(columns).divergent_tokens > 0
    if not dirty.any():
        raise UndecidedError("no request diverges, so there is none to send alone")
    return int(dirty.argmax())


def seen_of(server: Server) -> dict[str, Any]:
    """What the server says of itself, with what experiments ask for beside the `server` object."""
    facts = server.facts.as_dict()
    return {
        **{name: server.info.get(name) for name in _PRESENT_INFO},
        **facts,
        "quantised_kv": quantised_kv(facts),
    }


def _say(session: Session, outcome: Outcome, helper: str, elapsed_s: float) -> None:
    number = 1 + max((made.number for made in session.state.experiments), default=0)
    session.emit(
        ev.ExperimentEnded(
            experiment=number,
            run=session.state.run.number if session.state.run is not None else None,
            helper=helper,
            name=outcome.name,
            result={**outcome.as_dict(), "meaning": meaning(outcome)},
            elapsed_s=elapsed_s,
        )
    )


def judge_again(session: Session) -> None:
    """The verdict of the latest run after what was located and tried since, as an event."""
    run = session.state.run
    if run is None:
        return
    verdict = verdict_now(session.folder, session.state, run)
    if verdict is not None and verdict != run.verdict:
        session.emit(ev.RunJudged(run=run.number, verdict=verdict))


def verdict_now(folder: SessionFolder, state: SessionState, run: RunState) -> dict[str, Any] | None:
    """The verdict on a run from its columns, findings and experiments; None where a column is unreadable."""
    columns: dict[HelperName, HelperColumns] = {}
    for helper in run.helpers:
        if helper.columns is not None:
            try:
                part = load_columns(folder.resolve(helper.columns))
            except KlbenchError:
                return None
            columns[part.helper] = part
    results = {name: h.result for name in HELPERS if (h := run.helper(name)) is not None and h.result}
    findings: list[Any] = []
    for located in state.located_of(run):
        found = located.result.get("findings")
        findings += found if isinstance(found, list) else []
    made = [dict(made.result) for made in state.experiments_of(run)]
    facts = dict((run.server or state.server).facts)
    return diagnose(results, columns, facts, findings=findings, experiments=made)


def experiment_document(
    session: Path, state: SessionState, error: KlbenchError | None = None
) -> dict[str, Any]:
    """klbench.experiment/1 of the experiments on the latest run."""
    document = header(session, state, EXPERIMENT_SCHEMA)
    run = state.run
    made = state.experiments_of(run)
    document["helper"] = made[-1].helper if made else None
    document["plan"] = dict(state.experiment_plan)
    document["experiments"] = [
        {**dict(one.result), "helper": one.helper, "elapsed_s": round(one.elapsed_s, 3)} for one in made
    ]
    document["verdict"] = dict(run.verdict) if run is not None and run.verdict else None
    if error is not None:
        document["error"] = error.as_dict()
    return document


def experiment_exit_code(state: SessionState) -> ExitCode:
    """1 if something diverges or repeats differ, else 5 if an experiment has no answer, else 0."""
    made = state.experiments_of(state.run)
    diverged = any(helper.status == "diverged" for helper in state.run.helpers) if state.run else False
    if diverged or any(one.name == "repeats" and one.result.get("outcome") == "differs" for one in made):
        return ExitCode.DIVERGED
    outcomes = {str(one.result.get("outcome")) for one in made}
    unanswered = not made or outcomes & {NOT_POSSIBLE, NOT_COMPARABLE, "no_effect"}
    return ExitCode.UNDECIDED if unanswered else ExitCode.CONSISTENT
