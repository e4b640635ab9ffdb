"""A report as Markdown that renders the same in any viewer and pastes into an issue.

Invariants: no untrusted text is ever read as markup. Names, prompts, paths and the server's own words stand
in code spans or fences longer than any run of backticks in them; our sentences, which may quote such names,
have all punctuation escaped. Control and bidirectional characters are spelled out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from klbench.core.text import visible

if TYPE_CHECKING:
    from klbench.session.report import DivergentRequest, Report, ReportHelper, ReportOrigin, ReportRun

# What Markdown could take for markup inside a line: no more, for a report is also read as it stands.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)//")
_LINE_START = re.compile(r"^(\s*)(?=[-+#=]|\d+[.)])(\d*)")
_HELPER_COLUMNS = (
    "helper", "status", "hits", "dropped", "tokens", "differ", "bit-equal", "avg KL", "max Δ", "past",
)  # fmt: skip
_SERVER_FACTS = (
    "sglang_version", "sglang_path", "git_commit", "git_dirty", "torch", "cuda", "driver", "gpus", "model",
    "dtype", "kv_cache_dtype", "quantization", "device", "attention_backend", "deterministic", "radix_cache",
    "page_size", "chunked_prefill_size", "tp_size", "dp_size", "pp_size", "nnodes", "cuda_graphs", "overlap",
    "speculative", "numerics_env",
)  # fmt: skip


def text(value: object) -> str:
    """A sentence that renders as it reads."""
    escaped = _MARKUP.sub(lambda found: "\\" + found.group(), visible(str(value)))
    # A sentence that begins like a list or a heading is none.
    return _LINE_START.sub(lambda found: f"{found.group(1)}{found.group(2)}\\", escaped)


def code(value: object) -> str:
    """Untrusted text in a code span, also inside a table's cell."""
    shown = visible(str(value)).replace("|", "\\|")
    if not shown.strip():
        return f"`{shown}`" if shown else "–"
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(lines: Iterable[str]) -> list[str]:
    """Untrusted lines in a fence that they cannot close."""
    shown = [visible(line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *shown, fence]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of cells that are Markdown already."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(report: Report) -> str:
    """The whole report, ending in one line feed."""
    lines = [
        "# klbench report",
        "",
        summary(report),
        "",
        *_server(report),
        *(line for run in reversed(report.runs) for line in _run(run)),
        *(line for origin in reversed(report.located) for line in _origin(origin)),
        "## What was not checked",
        "",
        *([f"- {text(note)}" for note in report.not_checked] or ["- nothing that klbench knows of"]),
        "",
        *_troubles(report),
        "## Repeat it",
        "",
    ]
    for what, command in report.repeat:
        lines += [f"{text(what.capitalize())}:", "", *block([command]), ""]
    return "\n".join(lines).rstrip() + "\n"


def summary(report: Report) -> str:
    """The answer in one or two sentences, with its grade."""
    if not report.runs:
        return "No helper was run in this session."
    run = report.runs[-1]
    parts = [f"{helper.name} {helper.result.get('status')}" for helper in run.helpers]
    sentence = f"**{text(' · '.join(parts))}**"
    if run.verdict:
        conditions = ", ".join(map(str, run.verdict.get("conditions") or [])) or run.verdict.get("status")
        sentence += f" – verdict: {text(conditions)} ({text(run.verdict.get('grade'))})."
    if report.located:
        for finding in _findings(report.located[-1])[:1]:
            sentence += (
                f" Origin: {text(finding.get('kind'))} at {code(finding.get('module'))} "
                f"({text(finding.get('grade'))})."
            )
    return sentence


def _server(report: Report) -> list[str]:
    facts = report.header["server"]
    lines = ["## Server", ""]
    known = [name for name in _SERVER_FACTS if name in facts]
    known += [name for name in facts if name not in _SERVER_FACTS]
    rows = [("klbench", code(report.klbench_version)), ("session", code(report.header["session"]))]
    rows += [
        (text(name.replace("_", " ")), "–" if facts[name] is None else code(_value(facts[name])))
        for name in known
    ]
    lines += [*table(("what", "in force"), rows), ""]
    if report.fault:
        lines += [f"A fault was planted on purpose: {code(report.fault)}", ""]
    if report.server_ended:
        lines += [f"The server ended by itself: {code(report.server_ended)}", ""]
    for item in report.differs:
        lines.append(f"- asked {code(item.get('asked', ''))}, in force {code(item.get('in_force', ''))}")
    lines += [f"- {text(note)}" for note in report.notes]
    return [*lines, ""] if lines[-1] else lines


def _run(run: ReportRun) -> list[str]:
    prompts = run.prompts
    lines = [
        f"## Run {run.number}",
        "",
        f"{text(run.started_at)}, {_seconds(run.elapsed_s)}"
        + (", cancelled" if run.cancelled else "")
        + f". Prompts: {text(prompts.get('count', '?'))} from {code(prompts.get('source', '?'))}, "
        f"SHA-256 {code(prompts.get('sha256', '?'))}.",
        "",
    ]
    lines += [*table(_HELPER_COLUMNS, (_helper_row(helper) for helper in run.helpers)), ""]
    for helper in run.helpers:
        if reason := helper.result.get("reason"):
            lines.append(f"- {text(helper.name)}: {text(reason)}")
    lines.append("") if lines[-1] else None
    for helper in run.helpers:
        lines += _divergent(helper.name, helper.divergent)
    if run.verdict:
        lines += [f"### Verdict: {text(run.verdict.get('status'))} ({text(run.verdict.get('grade'))})", ""]
        lines += [f"- {text(item.get('text', ''))}" for item in run.verdict.get("evidence", [])]
        lines += [f"- next: {text(item.get('text', ''))}" for item in run.verdict.get("next", [])]
        lines.append("")
    return lines


def _helper_row(helper: ReportHelper) -> list[str]:
    result = helper.result
    past = result.get("fraction_past")
    tails = (
        ", ".join(f"{name}: {_number(part)}" for name, part in past.items())
        if isinstance(past, Mapping)
        else past
    )
    return [
        text(helper.name),
        text(result.get("status")),
        f"{_number(result.get('hits'))}/{_number(result.get('requests'))}",
        _number(result.get("dropped")),
        _number(result.get("tokens")),
        _number(result.get("divergent_tokens")),
        _number(result.get("bit_equal_fraction")),
        _number(result.get("avg_kl_div")),
        _number(result.get("max_abs_dlogprob")),
        text(tails) if tails is not None else "–",
    ]


def _divergent(helper: str, requests: Sequence[DivergentRequest]) -> list[str]:
    if not requests:
        return []
    from klbench.session.report import DIVERGENT_SHOWN

    worst = sorted(requests, key=lambda r: -(r.kl_nats if r.kl_nats is not None else float("inf")))
    names = ["request", "prompt", "cached", "KL", "differ", "first offset", "position"]
    residues = list(worst[0].residues)
    rows = [
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
        for r in worst[:DIVERGENT_SHOWN]
    ]
    more = len(worst) - DIVERGENT_SHOWN
    return [
        f"### Divergent requests of {text(helper)}",
        "",
        *table([*names, *map(text, residues)], rows),
        "",
        *([f"{more} more in the JSON report.", ""] if more > 0 else []),
    ]


def _findings(origin: ReportOrigin) -> list[Mapping[str, Any]]:
    return [finding for finding in origin.result.get("findings", []) if isinstance(finding, Mapping)]


def _origin(origin: ReportOrigin) -> list[str]:
    lines = [
        f"## Origin in request {origin.request} of {text(origin.helper)}",
        "",
        f"Located in {_seconds(origin.elapsed_s)}.",
        "",
    ]
    findings = _findings(origin)
    if not findings:
        lines += ["No origin was found.", ""]
    for finding in findings:
        lines += _finding(finding)
    around = [row for row in origin.result.get("around") or [] if isinstance(row, Mapping)]
    if around:
        names = list(dict.fromkeys(name for row in around for name in row))
        lines += ["### Operators around the origin", ""]
        lines += table(
            [text(n) for n in names], ([code(_value(row.get(n))) for n in names] for row in around)
        )
        lines.append("")
    for name in ("alignment", "capture"):
        part = origin.result.get(name)
        if isinstance(part, Mapping):
            lines += [f"### {name.capitalize()}", ""]
            lines += [f"- {text(key)}: {code(_value(value))}" for key, value in part.items()] + [""]
    masked = origin.result.get("masked") or []
    if masked:
        lines += ["### Masked", "", "Behind an origin, could not be judged:", ""]
        lines += [f"- {code(_value(item))}" for item in masked[:40]] + [""]
    return lines


def _finding(finding: Mapping[str, Any]) -> list[str]:
    shown = ("module", "layer", "kinds", "request", "helper", "arm", "rank", "phase", "positions", "ulp_max")
    lines = [
        f"### {text(finding.get('kind'))} ({text(finding.get('grade'))})"
        + (" – latent: it reaches no divergent token" if finding.get("latent") else ""),
        "",
    ]
    known = [name for name in (*shown, "replay_M") if finding.get(name) is not None]
    lines += [f"- {text(name.replace('_', ' '))}: {code(_value(finding[name]))}" for name in known]
    for item in finding.get("evidence") or []:
        sentence = item.get("text", "") if isinstance(item, Mapping) else item
        lines.append(f"- {text(sentence)}")
    return [*lines, ""]


def _troubles(report: Report) -> list[str]:
    if not report.troubles:
        return []
    lines = ["## Troubles on the way", ""]
    for item in report.troubles:
        rest = " · ".join(part for part in (item["why"], item["next"]) if part)
        lines.append(f"- {text(item['level'])}: {text(item['what'])}" + (f" · {text(rest)}" if rest else ""))
    return [*lines, ""]


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
    return f"{value:.6g}" if isinstance(value, float) else text(value)


def _seconds(elapsed_s: float | None) -> str:
    return "not finished" if elapsed_s is None else f"{elapsed_s:.1f} s"
