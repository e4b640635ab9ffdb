"""What the origin's screen says: pure functions of a located result, whose text is untrusted.

CONFIRMED  state_restore  model.layers.1.self_attn.attn  row 267, extend
K of row 264 was read from slot 8131 with other bits than the warming arm wrote there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.text import counted, elapsed
from klbench.errors import UsageError
from klbench.session.replayable import check_can_replay
from klbench.session.state import LocatedState
from klbench.tui import wording
from klbench.tui.verdict_words import Paragraph, mappings

_MOST_CELLS = 4_000_000
_REPLAYED = ("replay_changes", "replay_invariant")


def title_line(found: LocatedState) -> str:
    """Where am I: request, helper, how it was captured and how much that was."""
    capture = found.result.get("capture")
    backend = str(capture.get("backend") or "") if isinstance(capture, Mapping) else ""
    amount = wording.size_words(capture.get("bytes")) if isinstance(capture, Mapping) else ""
    words = ["klbench", "origin", f"request {found.request}", found.helper]
    words += [f"{backend} capture {amount}".strip()] if backend else []
    return " " + " · ".join([*words, elapsed(found.elapsed_s)])


def finding_line(finding: Mapping[str, Any]) -> str:
    """`CONFIRMED  state_restore  model.layers.1.self_attn.attn  47 rows from 264, decode`."""
    kinds = [str(kind) for kind in finding.get("kinds") or [finding.get("kind", "?")]]
    positions = finding.get("positions")
    row = f"row {positions.get('first')}" if isinstance(positions, Mapping) else ""
    rows = positions.get("count") if isinstance(positions, Mapping) else None
    if isinstance(rows, int) and rows > 1 and isinstance(positions, Mapping):
        row = f"{rows} rows from {positions.get('first')}"
    row = ", ".join(word for word in (row, str(finding.get("phase") or "")) if word)
    grade = str(finding.get("grade", "unknown")).upper()
    latent = "  latent: it reaches no divergent token" if finding.get("latent") else ""
    words = [
        grade,
        " or ".join(kinds),
        str(finding.get("module") or "?"),
        row,
    ]
    return " " + "  ".join(word for word in words if word) + latent


def finding_sentence(finding: Mapping[str, Any]) -> str:
    """The finding in one sentence: what its kind's own evidence says, else that of the origin."""
    facts = mappings(finding.get("evidence"))
    for code in (str(finding.get("kind")), "origin"):
        for fact in facts:
            if fact.get("code") == code and fact.get("text"):
                return str(fact["text"])
    return str(facts[0].get("text") or "") if facts else ""


def no_finding(result: Mapping[str, Any]) -> str:
    """Why there is no origin, as far as the result says."""
    alignment = result.get("alignment")
    if isinstance(alignment, Mapping) and alignment.get("proved") is False:
        return f" NOT ALIGNED  {alignment.get('reason') or 'the arms could not be paired row by row'}"
    return f" NO ORIGIN  {result.get('reason') or 'no operator differs with equal inputs in this trace'}"


def not_replayable(finding: Mapping[str, Any]) -> str:
    """Why the finding's operator cannot be called again alone, empty where it can be."""
    try:
        check_can_replay(finding)
    except UsageError as error:
        return f"{error.what}: {error.why}"
    return ""


def replay_of(found: LocatedState, number: int) -> Mapping[str, Any] | None:
    """The M table of a finding: the latest replay that was asked for, else the one of its confirmation."""
    if number in found.replays:
        return found.replays[number]
    findings = mappings(found.result.get("findings"))
    for fact in mappings(findings[number].get("evidence")) if number < len(findings) else []:
        if fact.get("code") in _REPLAYED and isinstance(fact.get("values"), Mapping):
            values: Mapping[str, Any] = fact["values"]
            return values
    return None


def replay_lines(replay: Mapping[str, Any], width: int) -> list[str]:
    """The M table: each M that was tried, ≠ where the row's bits are not those that it has alone.

    M: other bits from 64 rows on, by at most 22 ulps; the arms had 16 and 4096
       M      1  2  3  4  8  16  32  64  127
       bits   ·  ·  ·  ·  ·   ·   ·   ≠    ≠
    """
    tried, changed = _numbers(replay.get("tried_M")), set(_numbers(replay.get("changed_M")))
    if not tried:
        return [f" replay: {replay.get('reason') or replay.get('status') or 'it was not called again'}"]
    first = min(changed, default=None)
    said = " M: its bits are the same with each" if first is None else f" M: other bits from {first} rows on"
    if replay.get("ulp_max") is not None and first is not None:
        said += f", by at most {counted(replay['ulp_max'], 'ulp')}"
    arms = _numbers(replay.get("arms_M"))
    said += f"; the arms had {' and '.join(map(str, arms))}" if arms else ""
    lines = [said]
    heads, marks = "   M    ", "   bits "
    for m in tried:
        text = str(m)
        if len(heads) + len(text) + 2 > width:
            lines += [heads, marks]
            heads, marks = "        ", "        "
        heads += "  " + text
        marks += "  " + f"{'≠' if m in changed else '·':>{len(text)}}"
    return [*lines, heads, marks]


def _numbers(items: object) -> list[int]:
    return [item for item in items if isinstance(item, int)] if isinstance(items, list | tuple) else []


def evidence_lines(result: Mapping[str, Any], number: int = 0) -> list[str]:
    """The evidence of one finding, the other findings, what is masked, what was checked."""
    findings = mappings(result.get("findings"))
    lines = _evidence(findings[number].get("evidence")) if number < len(findings) else []
    others = [finding for place, finding in enumerate(findings) if place != number]
    lines += [f"Also: {finding_line(other).strip()}" for other in others]
    notes = result.get("notes")
    lines += [str(note) for note in notes] if isinstance(notes, list) else []
    masked = mappings(result.get("masked"))
    if masked:
        # An operator is masked once a phase, call and rank; here it is named once.
        names = list(dict.fromkeys(str(item.get("module", "?")) for item in masked))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"Masked, in its causal cone and not judged: {', '.join(names[:4])}{more}")
    alignment, capture = result.get("alignment"), result.get("capture")
    if isinstance(alignment, Mapping) and alignment.get("proved"):
        state_only = isinstance(capture, Mapping) and capture.get("backend") == "state"
        proof = "token and position" if state_only else "token, position and embedding bits"
        lines.append(f"{alignment.get('rows', '?')} rows paired by {proof}.")
    if isinstance(capture, Mapping) and "changed_logprobs" in capture:
        changed = capture.get("changed_logprobs")
        lines.append(f"Capture changed {changed} logprobs." if changed else "Capture changed no logprob.")
    return lines


def evidence_paragraphs(found: LocatedState, number: int) -> list[Paragraph]:
    """Those lines under a ▸, without the sentence that stands above them already."""
    findings = mappings(found.result.get("findings"))
    said = finding_sentence(findings[number]) if number < len(findings) else ""
    return [(" ▸ ", line) for line in evidence_lines(found.result, number) if line and line != said]


def map_layers(given: object) -> tuple[str, ...]:
    """The layers of a `map` by their names, without its cells."""
    labels = given.get("layers") if isinstance(given, Mapping) else None
    return _layer_names(labels) if isinstance(labels, list) else ()


def _layer_names(labels: Sequence[object]) -> tuple[str, ...]:
    return tuple(f"layer {label}" if str(label).isdigit() else str(label) for label in labels)


def read_map(
    given: object,
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Labels, row positions and cells (as the widget counts) of the `map` in a located result; empty where it
    is not one. There a cell is -1 not observed, 0 equal, 1 state differs, 2 differs, 3 origin."""
    nothing = ((), np.zeros(0, np.int64), np.zeros((0, 0), np.int8))
    if not isinstance(given, Mapping):
        return nothing
    labels, positions, grid = given.get("layers"), given.get("positions"), given.get("cells")
    if not (isinstance(labels, list) and isinstance(positions, list) and isinstance(grid, list)):
        return nothing
    if not grid or len(grid) != len(labels) or len(grid) * len(positions) > _MOST_CELLS:
        return nothing
    try:
        cells = np.asarray(grid, dtype=np.int64)
        places = np.asarray(positions, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return nothing
    if cells.shape != (len(labels), len(places)) or cells.min(initial=0) < -1 or cells.max(initial=0) > 3:
        return nothing
    return _layer_names(labels), places, (cells + 1).astype(np.int8)


def progress_bar(done: int, total: int, width: int) -> str:
    """`█████░░░░░  41 %`, or nothing where the total is unknown or nothing was counted yet."""
    if total <= 0 or done <= 0:
        return ""
    filled = min(max(done * width // total, 0), width)
    return "█" * filled + "░" * (width - filled) + f"  {100 * min(done, total) // total} %"


def _evidence(items: object) -> list[str]:
    if not isinstance(items, list | tuple):
        return []
    return [str(item.get("text", "")) if isinstance(item, Mapping) else str(item) for item in items]


def summary_lines(found: LocatedState, number: int) -> Sequence[str]:
    """The finding's line and its sentence, or why there is none."""
    findings = mappings(found.result.get("findings"))
    if number >= len(findings):
        return [no_finding(found.result)]
    many = f"  finding {number + 1} of {len(findings)}" if len(findings) > 1 else ""
    return [finding_line(findings[number]) + many, f" {finding_sentence(findings[number])}"]
