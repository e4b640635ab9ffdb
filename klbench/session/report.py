"""The report of a session: one self-contained file in each format, with the same content.

`gather` collects the facts once, as plain data; report_content.py puts them in order, and the writers
(report_markdown.py, report_html.py, report_github.py, the JSON encoder) only write them down. Everything
in it may come from a server, a model or a file, and is untrusted text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import klbench
from klbench.errors import KlbenchError
from klbench.session.columns import load_columns
from klbench.session.documents import commands_to_repeat, header, helper_object, iso_time
from klbench.session.folder import SessionFolder, write_atomically, write_where_asked
from klbench.session.not_checked import not_checked
from klbench.session.plots import HelperPlots, helper_plots
from klbench.session.report_content import blocks
from klbench.session.report_github import Appendix, github
from klbench.session.report_html import html
from klbench.session.report_markdown import markdown
from klbench.session.state import CodeState, HelperState, LocatedState, RunState, SessionState
from klbench.session.stock import not_stock

if TYPE_CHECKING:
    from klbench.session.redaction import Redactor

SCHEMA = "klbench.report/1"


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
    plots: HelperPlots | None = None


@dataclass(frozen=True, slots=True)
class ReportRun:
    number: int
    started_at: str
    elapsed_s: float | None
    cancelled: bool
    prompts: dict[str, Any]
    helpers: list[ReportHelper]
    verdict: dict[str, Any] | None
    again_of: int | None = None
    """The run that this one measures again, to look further into it."""
    kept: list[str] = field(default_factory=list)
    """The helpers that stand as that run measured them."""


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
    located_now: int | None = None
    """The place in `located` of the latest that speaks of the latest run."""
    not_stock: list[str] = field(default_factory=list)
    """How the server differs from a stock deterministic one, one sentence each."""
    experiments: list[dict[str, Any]] = field(default_factory=list)
    """What was tried: name, helper, outcome, text, meaning."""
    census: dict[str, Any] | None = None
    """The body of the latest klbench.census/1."""
    code: dict[str, Any] | None = None
    """sglang's checkout: commit, subject, edited files."""


Format = Literal["md", "html", "json", "github"]
FORMATS: tuple[Format, ...] = ("md", "html", "json")
"""What is written when no format is named."""
_ENDINGS: dict[Format, str] = {"md": ".md", "html": ".html", "json": ".json", "github": "-issue.md"}


def gather(session: Path, state: SessionState) -> Report:
    """The report's content from the session's state and its columns."""
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
        runs=[_run(SessionFolder(session), run, state) for run in state.runs],
        located=[_origin(located) for located in state.located],
        located_now=state.located.index(state.located_now) if state.located_now is not None else None,
        not_checked=not_checked(state),
        troubles=[
            {"level": line.level, "what": line.what, "why": line.why, "next": line.next}
            for line in state.troubles
        ],
        repeat=commands_to_repeat(state, session),
        not_stock=not_stock(state),
        experiments=[
            {**made.result, "name": made.name, "helper": made.helper, "elapsed_s": made.elapsed_s}
            for made in state.experiments
        ],
        census=dict(state.latest_census.result) if state.latest_census is not None else None,
        code=_code(state.server.code),
    )


def write_report(
    folder: SessionFolder,
    state: SessionState,
    formats: Sequence[Format] = FORMATS,
    *,
    redactor: Redactor | None = None,
    appendix: Appendix | None = None,
    output: Path | None = None,
) -> list[Path]:
    """Writes `reports/report-<time>.<ending>` for each format, atomically; returns the files in order.

    A redacted report says so in its name. With `output` the one format goes there, and the session may be
    read-only. Raises UsageError where that is no place for a file, OSError where the disk refuses.
    """
    report = gather(folder.path, state)
    if redactor is not None:
        report = redactor.report(report)
    if output is not None:
        (name,) = formats
        write_where_asked(output, render(report, name, appendix))
        return [output]
    folder.reports.mkdir(exist_ok=True, mode=0o700)
    stem = _free_stem(folder.reports, "report" if redactor is None else "report-redacted")
    files = []
    for name in formats:
        file = folder.reports / f"{stem}{_ENDINGS[name]}"
        write_atomically(file, render(report, name, appendix))
        files.append(file)
    return files


def render(report: Report, name: Format, appendix: Appendix | None = None) -> bytes:
    """The report in one format."""
    match name:
        case "md":
            return markdown(blocks(report)).encode()
        case "html":
            return html(blocks(report), title="klbench report").encode()
        case "github":
            return github(report, appendix or Appendix(environment_missing="it was not asked for")).encode()
        case "json":
            return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def _free_stem(reports: Path, name: str) -> str:
    first = stem = time.strftime(f"{name}-%Y%m%d-%H%M%S")
    number = 1
    while any(reports.glob(f"{stem}.*")) or any(reports.glob(f"{stem}-issue.md")):
        number += 1
        stem = f"{first}_{number}"
    return stem


def _run(folder: SessionFolder, run: RunState, state: SessionState) -> ReportRun:
    return ReportRun(
        number=run.number,
        started_at=iso_time(run.started_at),
        elapsed_s=run.elapsed_s,
        cancelled=run.cancelled,
        prompts=dict(run.prompts),
        helpers=[_helper(folder, helper, state) for helper in run.helpers],
        verdict=dict(run.verdict) if run.verdict else None,
        again_of=run.again_of,
        kept=_kept(run, state),
    )


def _kept(run: RunState, state: SessionState) -> list[str]:
    before = next((one for one in state.runs if one.number == run.again_of), None)
    return [h.helper for h in run.helpers if before is not None and h == before.helper(h.helper)]


def _helper(folder: SessionFolder, helper: HelperState, state: SessionState) -> ReportHelper:
    result = helper_object(helper)
    divergent = [
        found
        for detail in result.get("requests_detail", [])
        if (found := _divergent(detail, state)) is not None
    ]
    return ReportHelper(helper.helper, result, divergent, _plots(folder, helper))


def _plots(folder: SessionFolder, helper: HelperState) -> HelperPlots | None:
    if helper.columns is None:
        return None
    # A report without plots is better than none.
    with contextlib.suppress(KlbenchError):
        return helper_plots(load_columns(folder.resolve(helper.columns)))
    return None


def _code(checkout: CodeState | None) -> dict[str, Any] | None:
    if checkout is None:
        return None
    return {"commit": checkout.commit, "subject": checkout.subject, "changed": sorted(checkout.changed)}


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
