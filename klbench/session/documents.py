"""The JSON documents klbench.run/1 and klbench.locate/1, and the exit codes that follow from them.

Invariants: made from the session's state alone, so a live run, a finished session and a report say the same;
a helper that was asked for and did not end is there with a status that is not clean; fields are only added
within /1.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import klbench
from klbench.core.experiments import GRAPHS_ON, configured_arguments
from klbench.core.verdict_words import NOT_EXERCISED
from klbench.errors import ExitCode, KlbenchError
from klbench.session.request import StartRequest
from klbench.session.state import HelperState, LocatedState, RunState, SessionState

RUN_SCHEMA = "klbench.run/1"
LOCATE_SCHEMA = "klbench.locate/1"

# What a helper that never ended says of itself; the numbers stay null, never zero.
_NOT_MEASURED: dict[str, Any] = {
    "requests": None,
    "hits": None,
    "dropped": None,
    "tokens": 0,
    "avg_kl_div": None,
    "threshold": None,
    "max_abs_dlogprob": None,
    "divergent_tokens": None,
    "bit_equal_fraction": None,
    "fraction_past": None,
    "nan_count": None,
    "requests_detail": [],
}
_NO_VERDICT: dict[str, Any] = {
    "status": "undecided",
    "conditions": [],
    "grade": "unknown",
    "evidence": [],
    "next": [],
}
_WITH_GRAPHS = "--no-ready-to-capture"


def iso_time(at: float) -> str:
    """Seconds since the epoch as UTC in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def header(session: Path, state: SessionState, schema: str) -> dict[str, Any]:
    """The fields that every document begins with."""
    runner = state.runner
    return {
        "schema": schema,
        "klbench_version": runner.klbench_version or klbench.__version__,
        "session": str(session),
        "started_at": iso_time(runner.started_at),
        "elapsed_s": round(max(0.0, state.at - runner.started_at), 3),
        "target": dict(runner.target),
        "options": dict(runner.options),
        "server": dict(state.server.facts),
        "damaged_lines": state.damage.count,
    }


def run_document(
    session: Path, state: SessionState, run: RunState | None, error: KlbenchError | None = None
) -> dict[str, Any]:
    """klbench.run/1 of one run; without a run what there is, with `error` when something failed."""
    document = header(session, state, RUN_SCHEMA)
    document["prompts"] = dict(run.prompts) if run else {}
    document["helpers"] = {helper.helper: helper_object(helper) for helper in run.helpers} if run else {}
    document["verdict"] = dict(run.verdict) if run and run.verdict else dict(_NO_VERDICT)
    document["not_exercised"] = _not_exercised_how(state, run)
    if error is not None:
        document["error"] = error.as_dict()
    return document


def helper_object(helper: HelperState) -> dict[str, Any]:
    """The helper's object of klbench.run/1, also when it did not end."""
    if helper.result is not None:
        return dict(helper.result)
    reason = "it was not reached" if not helper.arms else f"interrupted in the {helper.arms[-1].arm} arm"
    return {"status": "not_run", "reason": reason, **_NOT_MEASURED}


def locate_document(
    session: Path,
    state: SessionState,
    run: RunState | None,
    located: LocatedState | None,
    error: KlbenchError | None = None,
) -> dict[str, Any]:
    """klbench.locate/1; without a located result the run's statuses say why there is none."""
    document = header(session, state, LOCATE_SCHEMA)
    document["prompts"] = dict(run.prompts) if run else {}
    document["statuses"] = (
        {helper.helper: helper_object(helper)["status"] for helper in run.helpers} if run else {}
    )
    document["verdict"] = dict(run.verdict) if run and run.verdict else dict(_NO_VERDICT)
    document["not_exercised"] = _not_exercised_how(state, run)
    body: Mapping[str, Any] = located.result if located is not None else {}
    document["helper"] = located.helper if located is not None else None
    document["request"] = located.request if located is not None else None
    document["alignment"] = body.get("alignment")
    document["capture"] = body.get("capture")
    document["findings"] = list(body.get("findings", []))
    document["masked"] = list(body.get("masked", []))
    for name, value in body.items():
        document.setdefault(name, value)
    if error is not None:
        document["error"] = error.as_dict()
    return document


def verdict_items(verdict: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The objects in a verdict's list `name` (evidence, next); what is none in a strange log is left out."""
    items = (verdict or {}).get(name)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list | tuple) else []


def not_exercised(verdict: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What the verdict's evidence says that the run never put to the test: code, text, values."""
    found = []
    for item in verdict_items(verdict, "evidence"):
        values = item.get("values")
        values = dict(values) if isinstance(values, Mapping) else {}
        # Nobody expects match to hit the cache.
        if item.get("code") in NOT_EXERCISED and (item["code"], values.get("helper")) != ("cold", "match"):
            found.append({"code": item["code"], "text": str(item.get("text")), "values": values})
    return found


def missed_lines(items: Sequence[object]) -> list[str]:
    """What a run will not put to the test, and what would, a line each; of `RunStarted.not_exercised`."""
    found = [item for item in items if isinstance(item, Mapping)]
    return [" · ".join(str(item[key]) for key in ("text", "advice") if item.get(key)) for item in found]


def _not_exercised_how(state: SessionState, run: RunState | None) -> list[dict[str, Any]]:
    """The same, with the `command` that would exercise it where klbench can start the server so."""
    found = not_exercised(run.verdict if run else None)
    for item in found:
        if item["code"] == "no_graphs" and (command := _with_graphs(state)) is not None:
            item["command"] = command
    return found


def _with_graphs(state: SessionState) -> str | None:
    """The command that measures on a server of ours with CUDA graphs, and locates what differs there."""
    start = _start_of(state)
    if start is None or start.target.kind == "url":
        return None
    arguments = configured_arguments(start.target.arguments, GRAPHS_ON)
    target = msgspec.structs.replace(start.target, arguments=arguments)
    options = msgspec.structs.replace(start.options, ready_to_capture=False)
    return StartRequest(target=target, options=options).command_line("locate", _WITH_GRAPHS)


def run_exit_code(run: RunState) -> ExitCode:
    """1 if any helper diverged, else 5 if any requested helper is not clean, else 0."""
    statuses = [helper.status for helper in run.helpers]
    if "diverged" in statuses:
        return ExitCode.DIVERGED
    if statuses and all(status == "clean" for status in statuses):
        return ExitCode.CONSISTENT
    return ExitCode.UNDECIDED


def locate_exit_code(run: RunState | None, located: LocatedState | None) -> ExitCode:
    """0 no divergence, 1 at least one origin, 5 a divergence without an origin or nothing to judge by."""
    if located is not None:
        origins = [finding for finding in located.result.get("findings", []) if not finding.get("latent")]
        return ExitCode.DIVERGED if any(map(_is_origin, origins)) else ExitCode.UNDECIDED
    if run is not None and run_exit_code(run) == ExitCode.CONSISTENT:
        return ExitCode.CONSISTENT
    return ExitCode.UNDECIDED


def _is_origin(finding: Mapping[str, Any]) -> bool:
    return finding.get("kind") not in ("not_aligned", "not_observed", None)


def commands_to_repeat(state: SessionState, session: Path) -> list[tuple[str, str]]:
    """What each step was and the command that repeats it; untrusted text."""
    steps: list[tuple[str, str]] = []
    start = _start_of(state)
    if start is not None:
        steps.append(("measure the helpers", start.command_line("run")))
        for located in state.located[-1:]:
            options = msgspec.structs.replace(start.options, helpers=(located.helper,))
            again = msgspec.structs.replace(start, options=options)
            more = ["--request", str(located.request)]
            if start.target.kind != "url" and (located.result.get("capture") or {}).get("backend") == "state":
                more.append(_WITH_GRAPHS)
            steps.append(("locate the origin", again.command_line("locate", *more)))
        steps += _experiments_to_repeat(state, start)
        if state.censuses:
            steps.append(("take the census of operators", start.command_line("census")))
        for item in _not_exercised_how(state, state.run):
            if "command" in item:
                steps.append((f"exercise what was not: {item['text'].partition(':')[0]}", item["command"]))
    if state.server.command:
        steps.append(("start the server alone", state.server.command))
    place = shlex.quote(str(session))
    if state.located:
        steps.append(("export the origin as a script", f"klbench export {place}"))
    steps.append(("do the same after a change, and compare", f"klbench run --like {place}"))
    steps.append(("read this session", f"klbench open {place}"))
    return steps


def _start_of(state: SessionState) -> StartRequest | None:
    """What the session was asked for; None where a strange log does not say it."""
    if not state.runner.target:
        return None
    try:
        return msgspec.convert(
            {"target": dict(state.runner.target), "options": dict(state.runner.options)}, StartRequest
        )
    except msgspec.ValidationError:
        return None


def _experiments_to_repeat(state: SessionState, start: StartRequest) -> list[tuple[str, str]]:
    """One command for each helper that experiments were made on."""
    names: dict[str, list[str]] = {}
    for made in state.experiments:
        known = names.setdefault(made.helper, [])
        if made.name not in known:
            known.append(made.name)
    steps = []
    for helper, made_on in names.items():
        options = msgspec.structs.replace(start.options, helpers=(helper,))
        again = msgspec.structs.replace(start, options=options)
        steps.append((f"make the experiments on {helper}", again.command_line("experiment", *made_on)))
    return steps
