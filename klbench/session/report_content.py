"""What a report says, in order, as blocks: the answer first, then its evidence, then what is missing.

`Detail` says how much of long tables is shown; the JSON report always has all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klbench.core.verdict_words import verdict_in_words
from klbench.session.documents import verdict_items
from klbench.session.plots import histogram_svg, map_svg, position_svg
from klbench.session.report_blocks import (
    Block,
    Code,
    Fence,
    Figure,
    Fold,
    Inline,
    Span,
    Strong,
    Table,
    bullets,
    heading,
    paragraph,
    table,
)

if TYPE_CHECKING:
    from klbench.session.report import DivergentRequest, Report, ReportHelper, ReportOrigin, ReportRun

_HELPER_COLUMNS = (
    "helper", "status", "hits", "dropped", "tokens", "differ", "bit-equal", "avg KL", "max Δ", "tokens past",
)  # fmt: skip
_SERVER_FACTS = (
    "sglang_version", "sglang_path", "git_commit", "git_dirty", "torch", "cuda", "driver", "gpus", "model",
    "dtype", "kv_cache_dtype", "quantization", "device", "attention_backend", "deterministic", "radix_cache",
    "page_size", "chunked_prefill_size", "tp_size", "dp_size", "pp_size", "nnodes", "cuda_graphs", "overlap",
    "speculative", "numerics_env",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Detail:
    """How many rows long tables show."""

    divergent: int = 32
    around: int = 200
    masked: int = 40
    troubles: int = 200
    runs: int = 1000


def blocks(report: Report, detail: Detail | None = None) -> list[Block]:
    """The whole report."""
    detail = detail or Detail()
    shown: list[Block] = [heading(1, "klbench report"), paragraph(*summary(report)), *_server(report)]
    for run in report.runs[::-1][: detail.runs]:
        shown += _run(run, detail)
    for origin in report.located[::-1][: detail.runs]:
        shown += _origin(origin, detail)
    shown += _experiments(report.experiments)
    shown += _census(report.census, detail)
    shown += [
        heading(2, "What was not checked"),
        bullets(report.not_checked or ["nothing that klbench knows of"]),
    ]
    if report.troubles:
        troubles = bullets([_trouble(item) for item in report.troubles[-detail.troubles :]])
        shown += [heading(2, "Troubles on the way"), Fold("Troubles", (troubles,), True)]
    shown.append(heading(2, "Repeat it"))
    for what, command in report.repeat:
        shown += [paragraph(f"{what.capitalize()}:"), Fence((command,))]
    return shown


def summary(report: Report) -> Span:
    """The answer in one or two sentences, with its grade."""
    if not report.runs:
        return ("No helper was run in this session.",)
    run = report.runs[-1]
    parts = [f"{helper.name} {helper.result.get('status')}" for helper in run.helpers]
    span: list[Inline] = [Strong(" · ".join(parts))]
    if run.verdict:
        span.append(f" – verdict: {verdict_in_words(run.verdict)}.")
    if report.located_now is not None:
        for finding in _findings(report.located[report.located_now])[:1]:
            span += [
                f" Origin: {finding.get('kind')} at ",
                Code(str(finding.get("module"))),
                f" ({finding.get('grade')}).",
            ]
    return tuple(span)


def _server(report: Report) -> list[Block]:
    facts = report.header["server"]
    known = [name for name in _SERVER_FACTS if name in facts]
    known += [name for name in facts if name not in _SERVER_FACTS]
    rows: list[list[Inline]] = [
        ["klbench", Code(report.klbench_version)],
        ["session", Code(str(report.header["session"]))],
    ]
    rows += [
        [name.replace("_", " "), "–" if facts[name] is None else Code(_value(facts[name]))] for name in known
    ]
    shown: list[Block] = [
        heading(2, "Server"),
        Fold("All that is in force", (table(("what", "in force"), rows),)),
    ]
    if report.fault:
        shown.append(paragraph("A fault was planted on purpose: ", Code(report.fault)))
    if report.server_ended:
        shown.append(paragraph("The server ended by itself: ", Code(report.server_ended)))
    items: list[Span] = [
        ("asked ", Code(item.get("asked", "")), ", in force ", Code(item.get("in_force", "")))
        for item in report.differs
    ]
    items += [(note,) for note in report.notes]
    if items:
        shown.append(bullets(items))
    shown.append(heading(3, "How it differs from a stock deterministic server"))
    shown.append(bullets(report.not_stock or ["in nothing that klbench knows of"]))
    if report.code:
        shown += _code(report.code)
    return shown


def _code(checkout: Mapping[str, Any]) -> list[Block]:
    shown: list[Block] = [
        heading(3, "Code"),
        paragraph("sglang's checkout: ", Code(str(checkout["commit"])), " ", Code(str(checkout["subject"]))),
    ]
    if changed := checkout.get("changed"):
        shown.append(bullets([("edited: ", Code(name)) for name in changed]))
    return shown


def _run(run: ReportRun, detail: Detail) -> list[Block]:
    prompts = run.prompts
    shown: list[Block] = [
        heading(2, f"Run {run.number}"),
        paragraph(
            f"{run.started_at}, {_seconds(run.elapsed_s)}" + (", cancelled" if run.cancelled else ""),
            f". Prompts: {prompts.get('count', '?')} from ",
            Code(str(prompts.get("source", "?"))),
            ", SHA-256 ",
            Code(str(prompts.get("sha256", "?"))),
            ".",
        ),
        table(_HELPER_COLUMNS, [_helper_row(helper) for helper in run.helpers]),
    ]
    if run.again_of is not None:
        said = f"Run {run.again_of} measured again, on a server started again to look further into it"
        stand = f"; as it was measured there: {', '.join(run.kept)}" if run.kept else ""
        shown.append(paragraph(f"{said}{stand}."))
    reasons = [f"{h.name}: {h.result['reason']}" for h in run.helpers if h.result.get("reason")]
    if reasons:
        shown.append(bullets(reasons))
    for helper in run.helpers:
        shown += _divergent(helper.name, helper.divergent, detail)
        shown += _plots(helper)
    if run.verdict:
        items = [str(item.get("text", "")) for item in verdict_items(run.verdict, "evidence")]
        items += [f"next: {item.get('text', '')}" for item in verdict_items(run.verdict, "next")]
        shown.append(heading(3, f"Verdict: {verdict_in_words(run.verdict)}"))
        if items:
            shown.append(bullets(items))
    return shown


def _plots(helper: ReportHelper) -> list[Block]:
    plots = helper.plots
    if plots is None or not plots.bins:
        return []
    return [
        Figure(
            position_svg(plots),
            f"{helper.name}: the largest |prefill - decode| by absolute position; a low bar is bit-equal",
        ),
        Figure(histogram_svg(plots), f"{helper.name}: tokens by the decade of |prefill - decode|, in nats"),
    ]


def _helper_row(helper: ReportHelper) -> list[Inline]:
    result = helper.result
    names = ("dropped", "tokens", "divergent_tokens", "bit_equal_fraction", "avg_kl_div", "max_abs_dlogprob")
    return [
        helper.name,
        str(result.get("status")),
        f"{_number(result.get('hits'))}/{_number(result.get('requests'))}",
        *(_number(result.get(name)) for name in names),
        _tail(result.get("fraction_past")),
    ]


def _tail(past: object) -> str:
    """`1e-9 96 %, 1e-3 83 %, 1e-2 39 %`: the first threshold and those at which the fraction falls."""
    if not isinstance(past, Mapping):
        return "–"
    shown, before = [], None
    for name, part in past.items():
        if isinstance(part, int | float) and part != before and (part or before is None):
            shown.append(f"{name} {100 * part:.3g} %")
            before = part
    return ", ".join(shown) or "–"


def _divergent(helper: str, requests: Sequence[DivergentRequest], detail: Detail) -> list[Block]:
    if not requests:
        return []
    worst = sorted(requests, key=lambda r: -(r.kl_nats if r.kl_nats is not None else float("inf")))
    names = ["request", "prompt", "cached", "KL", "differ", "first offset", "position"]
    residues = list(worst[0].residues)
    rows: list[list[Inline]] = [
        [
            str(r.index),
            str(r.prompt_len),
            str(r.cached_tokens),
            _number(r.kl_nats),
            f"{r.divergent_tokens}/{r.output_len}",
            str(r.first_offset),
            str(r.first_position),
            *(str(r.residues.get(name, "–")) for name in residues),
        ]
        for r in worst[: detail.divergent]
    ]
    shown: list[Block] = [table([*names, *residues], rows)]
    if (more := len(worst) - detail.divergent) > 0:
        shown.append(paragraph(f"{more} more in the JSON report."))
    title = f"Divergent requests of {helper}"
    return [heading(3, title), Fold(title, tuple(shown), True)]


def _findings(origin: ReportOrigin) -> list[Mapping[str, Any]]:
    return [finding for finding in origin.result.get("findings", []) if isinstance(finding, Mapping)]


def _origin(origin: ReportOrigin, detail: Detail) -> list[Block]:
    shown: list[Block] = [
        heading(2, f"Origin in request {origin.request} of {origin.helper}"),
        paragraph(f"Located in {_seconds(origin.elapsed_s)}."),
    ]
    findings = _findings(origin)
    if not findings:
        shown.append(paragraph("No origin was found."))
    for finding in findings:
        shown += _finding(finding)
    drawn = origin.result.get("map")
    if isinstance(drawn, Mapping) and (svg := map_svg(drawn)) is not None:
        shown.append(Figure(svg, "layers by rows: equal, state differs, differs, origin (outlined)"))
    around = [row for row in origin.result.get("around") or [] if isinstance(row, Mapping)]
    if around:
        names = list(dict.fromkeys(str(name) for row in around for name in row))
        rows = tuple(
            tuple((Code(_value(row.get(name))),) for name in names) for row in _nearest(around, detail.around)
        )
        title = "Operators around the origin"
        shown += [heading(3, title), Fold(title, (Table(tuple(names), rows),), True)]
    for name in ("alignment", "capture"):
        part = origin.result.get(name)
        if isinstance(part, Mapping):
            items: list[Span] = [(f"{key}: ", Code(_value(value))) for key, value in part.items()]
            shown += [heading(3, name.capitalize()), Fold(name.capitalize(), (bullets(items),))]
    masked = origin.result.get("masked") or []
    if masked:
        items = [(Code(_value(item)),) for item in masked[: detail.masked]]
        inner: list[Block] = [paragraph("Behind an origin, could not be judged:"), bullets(items)]
        if (more := len(masked) - detail.masked) > 0:
            inner.append(paragraph(f"{more} more in the JSON report."))
        shown += [heading(3, "Masked"), Fold("Masked", tuple(inner))]
    return shown


def _experiments(made: Sequence[Mapping[str, Any]]) -> list[Block]:
    """What was tried, what came of it and what that rules out."""
    if not made:
        return []
    rows: list[list[Inline]] = [
        [
            Code(str(one.get("name"))),
            Code(str(one.get("helper"))),
            Code(str(one.get("outcome"))),
            str(one.get("text") or "–"),
            str(one.get("meaning") or "–"),
        ]
        for one in made
    ]
    return [heading(2, "Experiments"), table(("experiment", "helper", "outcome", "seen", "meaning"), rows)]


def _census(taken: Mapping[str, Any] | None, detail: Detail) -> list[Block]:
    """Which operators change their bits with the number of rows."""
    if taken is None:
        return []
    operators = [one for one in taken.get("operators") or [] if isinstance(one, Mapping)]
    changed = [one for one in operators if one.get("status") == "not_invariant"]
    shown: list[Block] = [
        heading(2, "Operators by number of rows"),
        paragraph(
            f"{len(operators)} operators called again on {taken.get('rows')} rows: ",
            Code(_value(taken.get("summary") or {})),
        ),
    ]
    if changed:
        rows: list[list[Inline]] = [
            [Code(str(one.get("module"))), Code(_value(one.get("first_M"))), Code(_value(one.get("ulp_max")))]
            for one in changed[: detail.around]
        ]
        shown.append(table(("not invariant", "first at M", "most ulps"), rows))
    return shown


def _nearest(around: list[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The rows next to the origin, in their order."""
    origin = next((index for index, row in enumerate(around) if row.get("origin")), len(around) // 2)
    start = max(0, min(origin - count // 2, len(around) - count))
    return around[start : start + count]


def _finding(finding: Mapping[str, Any]) -> list[Block]:
    shown = (
        "module", "layer", "kinds", "request", "helper", "arm", "rank", "phase", "positions", "ulp_max",
        "replay_M",
    )  # fmt: skip
    latent = " – latent: it reaches no divergent token" if finding.get("latent") else ""
    items: list[Span] = [
        (f"{name.replace('_', ' ')}: ", Code(_value(finding[name])))
        for name in shown
        if finding.get(name) is not None
    ]
    evidence = finding.get("evidence") or []
    items += [(str(item.get("text", "") if isinstance(item, Mapping) else item),) for item in evidence]
    return [heading(3, f"{finding.get('kind')} ({finding.get('grade')}){latent}"), bullets(items)]


def _trouble(item: Mapping[str, str]) -> str:
    rest = " · ".join(part for part in (item["why"], item["next"]) if part)
    return f"{item['level']}: {item['what']}" + (f" · {rest}" if rest else "")


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _seconds(elapsed_s: float | None) -> str:
    return "not finished" if elapsed_s is None else f"{elapsed_s:.1f} s"
