"""The origin: the finding in one sentence, layers against rows, the operators around it, the evidence.

While a locate job runs the same screen shows its progress; when it has failed, why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from textual.containers import VerticalScroll
from textual.widget import Widget

from klbench.core.text import elapsed, fit, visible, wrap
from klbench.session import commands as cmd
from klbench.session.state import LocatedState
from klbench.tui import wording
from klbench.tui.actions import bindings
from klbench.tui.messages import Send
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.tables import operator_rows
from klbench.tui.widgets.layer_map import LayerMap
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable

_MOST_CELLS = 4_000_000


class OriginScreen(WorkScreen):
    """Shows what was located for the model's request; `latest` shows whatever was located last."""

    place = "origin"
    BINDINGS = bindings("origin")
    AUTO_FOCUS = "#around-table"

    def __init__(self, model: Model, *, latest: bool = False) -> None:
        super().__init__(model)
        self._latest = latest
        self._drawn: tuple[LocatedState, int] | None = None

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="finding")
        yield Pane(LayerMap(id="layer-map"), title="layers × rows", id="map")
        yield Pane(VirtualTable(id="around-table"), title="around the origin", id="around")
        yield VerticalScroll(Sentences(id="evidence"), id="evidence-body")

    @property
    def located(self) -> LocatedState | None:
        if self.model.state.job is not None and self.model.state.job.kind == "locate":
            return None
        return self.model.state.latest_located if self._latest else self.model.located

    def draw(self) -> None:
        found = self.located
        self.set_class(found is None, "working")
        if found is None:
            self._draw_progress()
            return
        if (found, self.size.width) == self._drawn:
            return
        self._drawn = (found, self.size.width)
        result = found.result
        width = self.size.width
        self.query_one("#title", Lines).show(fit(visible(title_line(found)), width))
        findings = _mappings(result.get("findings"))
        said = finding_line(findings[0]) if findings else no_finding(result)
        self.query_one("#finding", Lines).show("\n".join(wrap(visible(said), width - 1, indent=" ")))
        labels, positions, cells = read_map(result.get("map"))
        self.query_one(LayerMap).show(labels, positions, cells)
        around = _mappings(result.get("around"))
        table = self.query_one("#around-table", VirtualTable)
        table.empty = "The trace holds no operators around an origin."
        born = next((i for i, row in enumerate(around) if row.get("origin")), 0)
        table.show_rows(operator_rows(around) if around else NO_ROWS, cursor_key=born)
        first = findings[0] if findings else {}
        row = result.get("around_position")
        where = [] if first.get("layer") is None else [f"layer {first.get('layer')}"]
        where += [] if row is None else [f"row {row}", f"{result.get('around_arm') or '?'} arm"]
        entitle(self.query_one("#around", Pane), " · ".join(["around the origin", *where]))
        self.query_one("#evidence", Sentences).say(evidence_lines(result))

    def _draw_progress(self) -> None:
        model, job = self.model, self.model.state.job
        self.query_one("#title", Lines).show(
            f" klbench · locate · request {model.request} · {model.helper.helper}"
        )
        self._drawn = None
        if job is not None:
            bar = progress_bar(job.done, job.total, max(self.size.width - 30, 10))
            words = [f" ◌ {job.title}", "", f"   {wording.job(job, model.now)}"]
            words += [f"   {bar}"] if bar else []
            words += ["", "   The arms are repeated as they were measured, with the layers recorded.",
                      "   x cancels, esc goes back: the work goes on."]  # fmt: skip
        else:
            last = model.state.last_job
            words = [" Nothing was located for this request yet.", ""]
            if last is not None and last.kind == "locate" and last.outcome != "done":
                words = [f" The capture ended: {last.outcome}.", ""]
                errors = [line for line in model.state.troubles if line.level == "error"]
                words += [f"   {line}" for line in (wording.trouble(errors[-1]) if errors else [])]
            words += ["", "   esc back"]
        self.query_one("#finding", Lines).show("\n".join(words))

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))


def title_line(found: LocatedState) -> str:
    """Where am I: request, helper, how it was captured and how much that was."""
    capture = found.result.get("capture")
    backend = str(capture.get("backend") or "") if isinstance(capture, Mapping) else ""
    amount = wording.size_words(capture.get("bytes")) if isinstance(capture, Mapping) else ""
    words = ["klbench", "origin", f"request {found.request}", found.helper]
    words += [f"{backend} capture {amount}".strip()] if backend else []
    return " " + " · ".join([*words, elapsed(found.elapsed_s)])


def finding_line(finding: Mapping[str, Any]) -> str:
    """`CONFIRMED  state_restore  model.layers.1.self_attn.attn  row 264 (decode)`."""
    kinds = [str(kind) for kind in finding.get("kinds") or [finding.get("kind", "?")]]
    positions = finding.get("positions")
    row = f"row {positions.get('first')}" if isinstance(positions, Mapping) else ""
    rows = positions.get("count") if isinstance(positions, Mapping) else None
    if isinstance(rows, int) and rows > 1:
        row += f" and {rows - 1} more"
    grade = str(finding.get("grade", "unknown")).upper()
    latent = "  latent: it reaches no divergent token" if finding.get("latent") else ""
    words = [
        grade,
        " or ".join(kinds),
        str(finding.get("module") or "?"),
        row,
        str(finding.get("phase") or ""),
    ]
    return " " + "  ".join(word for word in words if word) + latent


def no_finding(result: Mapping[str, Any]) -> str:
    """Why there is no origin, as far as the result says."""
    alignment = result.get("alignment")
    if isinstance(alignment, Mapping) and alignment.get("proved") is False:
        return f" NOT ALIGNED  {alignment.get('reason') or 'the arms could not be paired row by row'}"
    return f" NO ORIGIN  {result.get('reason') or 'no operator differs with equal inputs in this trace'}"


def evidence_lines(result: Mapping[str, Any]) -> list[str]:
    """The evidence of the first finding, the other findings, what is masked, what was checked."""
    findings = _mappings(result.get("findings"))
    lines = _evidence(findings[0].get("evidence")) if findings else []
    lines += [f"Also: {finding_line(other).strip()}" for other in findings[1:]]
    masked = _mappings(result.get("masked"))
    if masked:
        names = ", ".join(str(item.get("module", "?")) for item in masked[:4])
        more = f" and {len(masked) - 4} more" if len(masked) > 4 else ""
        lines.append(f"Masked, in its causal cone and not judged: {names}{more}")
    alignment, capture = result.get("alignment"), result.get("capture")
    if isinstance(alignment, Mapping) and alignment.get("proved"):
        lines.append(f"{alignment.get('rows', '?')} rows paired by token, position and embedding bits.")
    if isinstance(capture, Mapping) and "changed_logprobs" in capture:
        changed = capture.get("changed_logprobs")
        lines.append(f"Capture changed {changed} logprobs." if changed else "Capture changed no logprob.")
    return lines


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
    names = tuple(f"layer {label}" if str(label).isdigit() else str(label) for label in labels)
    return names, places, (cells + 1).astype(np.int8)


def progress_bar(done: int, total: int, width: int) -> str:
    """`█████░░░░░  41 %`, or nothing where the total is unknown."""
    if total <= 0:
        return ""
    filled = min(max(done * width // total, 0), width)
    return "█" * filled + "░" * (width - filled) + f"  {100 * min(done, total) // total} %"


def _mappings(items: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(items, list | tuple):
        return []
    return [item for item in items if isinstance(item, Mapping)]


def _evidence(items: object) -> list[str]:
    if not isinstance(items, list | tuple):
        return []
    return [str(item.get("text", "")) if isinstance(item, Mapping) else str(item) for item in items]
