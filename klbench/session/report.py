"""The report of a session: one Markdown file and one JSON file with the same content.

`gather` collects the facts once, as plain data; report_markdown.py and the JSON encoder only write them down.
Everything in it may come from a server, a model or a file, and is untrusted text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import klbench
from klbench.core.columns import HELPERS
from klbench.session.documents import commands_to_repeat, header, helper_object, iso_time
from klbench.session.folder import SessionFolder, write_atomically
from klbench.session.report_markdown import markdown
from klbench.session.state import HelperState, LocatedState, RunState, SessionState

SCHEMA = "klbench.report/1"
DIVERGENT_SHOWN = 32
"""Divergent requests per helper in the Markdown; the JSON has all."""


@dataclass(frozen=True, slots=True)
class DivergentRequest:
    """One divergent request, with the residues by which regularities are seen."""

    index: int
    prompt_len: int
    cached_tokens: int
    kl_nats: float | None
    divergent_tokens: int
    output_len: int
    first_offset: int
    first_position: int
    residues: dict[str, int]
    """ "cached mod 8": 3, ..."""


@dataclass(frozen=True, slots=True)
class ReportHelper:
    name: str
    result: dict[str, Any]
    divergent: list[DivergentRequest]


@dataclass(frozen=True, slots=True)
class ReportRun:
    number: int
    started_at: str
    elapsed_s: float | None
    cancelled: bool
    prompts: dict[str, Any]
    helpers: list[ReportHelper]
    verdict: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReportOrigin:
    """One locate job."""

    helper: str
    request: int
    run: int | None
    elapsed_s: float
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report says."""

    schema: str
    written_at: str
    klbench_version: str
    header: dict[str, Any]
    fault: str | None
    server_command: str
    differs: list[dict[str, str]]
    notes: list[str]
    server_ended: str | None
    runs: list[ReportRun]
    located: list[ReportOrigin]
    not_checked: list[str]
    troubles: list[dict[str, str]]
    repeat: list[tuple[str, str]]


def gather(session: Path, state: SessionState) -> Report:
    """The report's content from the session's state."""
    end = state.server.ended
    return Report(
        schema=SCHEMA,
        written_at=iso_time(time.time()),
        klbench_version=klbench.__version__,
        header=header(session, state, SCHEMA),
        fault=state.server.fault,
        server_command=state.server.command,
        differs=[dict(item) for item in state.server.differs],
        notes=list(state.server.notes),
        server_ended=None if end is None or end.expected else end.why,
        runs=[_run(run, state) for run in state.runs],
        located=[_origin(located) for located in state.located],
        not_checked=not_checked(state),
        troubles=[
            {"level": line.level, "what": line.what, "why": line.why, "next": line.next}
            for line in state.troubles
        ],
        repeat=commands_to_repeat(state, session),
    )


def write_report(folder: SessionFolder, state: SessionState) -> list[Path]:
    """Writes `reports/report-<time>.md` and `.json`, each atomically; returns the two files."""
    report = gather(folder.path, state)
    folder.reports.mkdir(exist_ok=True, mode=0o700)
    stem = time.strftime("report-%Y%m%d-%H%M%S")
    number = 1
    while (folder.reports / f"{stem}.md").exists():
        number += 1
        stem = f"{stem.rsplit('_', 1)[0]}_{number}"
    files = [folder.reports / f"{stem}.md", folder.reports / f"{stem}.json"]
    write_atomically(files[0], markdown(report).encode("utf-8"))
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_atomically(files[1], encoded + b"\n")
    return files


def _run(run: RunState, state: SessionState) -> ReportRun:
    return ReportRun(
        number=run.number,
        started_at=iso_time(run.started_at),
        elapsed_s=run.elapsed_s,
        cancelled=run.cancelled,
        prompts=dict(run.prompts),
        helpers=[_helper(helper, state) for helper in run.helpers],
        verdict=dict(run.verdict) if run.verdict else None,
    )


def _helper(helper: HelperState, state: SessionState) -> ReportHelper:
    result = helper_object(helper)
    divergent = [
        found
        for detail in result.get("requests_detail", [])
        if (found := _divergent(detail, state)) is not None
    ]
    return ReportHelper(helper.helper, result, divergent)


def _divergent(detail: dict[str, Any], state: SessionState) -> DivergentRequest | None:
    first = detail.get("first_divergence")
    if not first:
        return None
    position = int(first["position"])
    prompt_len, cached = int(detail["prompt_len"]), int(detail["cached_tokens"])
    residues: dict[str, int] = {}
    for name, modulus in moduli(state).items():
        if modulus > position:
            # Every residue is the number itself: nothing to see.
            continue
        residues[f"prompt mod {name}"] = prompt_len % modulus
        residues[f"cached mod {name}"] = cached % modulus
        residues[f"first mod {name}"] = position % modulus
    return DivergentRequest(
        index=int(detail["index"]),
        prompt_len=prompt_len,
        cached_tokens=cached,
        kl_nats=detail.get("kl"),
        divergent_tokens=int(detail.get("divergent_tokens") or 0),
        output_len=int(detail.get("output_len") or 0),
        first_offset=int(first["offset"]),
        first_position=position,
        residues=residues,
    )


def moduli(state: SessionState) -> dict[str, int]:
    """The numbers whose multiples matter, by name: 8 and 64 always, the server's own sizes where known."""
    found = {"8": 8, "64": 64}
    for name, key in (("page", "page_size"), ("chunk", "chunked_prefill_size"), ("window", "sliding_window")):
        value = state.server.facts.get(key)
        if isinstance(value, int) and value > 1:
            found[f"{name} {value}"] = value
    return found


def _origin(located: LocatedState) -> ReportOrigin:
    return ReportOrigin(located.helper, located.request, located.run, located.elapsed_s, dict(located.result))


def not_checked(state: SessionState) -> list[str]:
    """What a reader must not take for settled, one sentence each."""
    run = state.run
    if run is None:
        return ["No helper was run."]
    ran = {helper.helper for helper in run.helpers}
    notes = [f"{name} was not asked for." for name in HELPERS if name not in ran]
    for helper in run.helpers:
        result = helper_object(helper)
        if result["status"] not in ("clean", "diverged"):
            notes.append(
                f"{helper.helper} is {result['status']}: {result.get('reason') or 'no reason given'}."
            )
        if dropped := result.get("dropped"):
            notes.append(f"{helper.helper} left out {dropped} requests that missed the cache.")
    count = run.prompts.get("count")
    if isinstance(count, int) and count < 32:
        notes.append(
            f"{count} prompts are fewer than the 32 of sglang's own tests: rare faults may not show."
        )
    diverged = [helper.helper for helper in run.helpers if helper.status == "diverged"]
    if diverged and not state.located:
        notes.append("The origin of the divergence was not located.")
    for located in state.located:
        notes += _open_questions(located)
    if not state.server.facts.get("deterministic", True):
        notes.append("The server does not run in deterministic mode: differences of rounding are expected.")
    return notes


def _open_questions(located: LocatedState) -> list[str]:
    notes = []
    for finding in located.result.get("findings", []):
        kinds = finding.get("kinds") or []
        if len(kinds) > 1:
            notes.append(
                f"Between {' and '.join(map(str, kinds))} the evidence at {finding.get('module')} "
                "does not decide."
            )
        if finding.get("grade") != "confirmed":
            notes.append(f"The finding at {finding.get('module')} is {finding.get('grade')}, not confirmed.")
    masked = located.result.get("masked") or []
    if masked:
        notes.append(f"{len(masked)} operators lie behind an origin and could not be judged.")
    return notes
