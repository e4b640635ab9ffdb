"""The origin: the finding in one sentence, layers against rows, operators around it, M table, evidence.

While a locate job runs the same screen shows its progress; when it has failed, why. Numbers and export need
no server: what they show was kept with the capture. A replay does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual.message import Message
from textual.widget import Widget

from klbench.core.text import shortened, visible, wrap
from klbench.engine.origin_numbers import OriginRows, origin_numbers
from klbench.errors import KlbenchError, UndecidedError
from klbench.session import commands as cmd
from klbench.session.exporting import export_located, finding_of, trace_dir_of
from klbench.session.state import LocatedState
from klbench.tui import origin_words as words
from klbench.tui import wording
from klbench.tui.actions import Situation, bindings, key_of
from klbench.tui.messages import Failed, Send
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.screens.numbers import NumbersScreen
from klbench.tui.tables import operator_rows
from klbench.tui.verdict_words import mappings, wrapped
from klbench.tui.widgets.layer_map import LEGEND, LayerMap
from klbench.tui.widgets.reading import reading
from klbench.tui.widgets.text import Lines, Pane, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, VirtualTable

if TYPE_CHECKING:
    from klbench.engine.export import Export


class OriginScreen(WorkScreen):
    """Shows what was located for the model's request; `latest` shows whatever was located last."""

    place = "origin"
    BINDINGS = bindings("origin")
    AUTO_FOCUS = "#around-table"

    @dataclass
    class NumbersRead(Message):
        """The rows of a finding, from the trace's folder."""

        rows: tuple[OriginRows, ...]
        title: str
        arm: str

    @dataclass
    class Exported(Message):
        """The folder of an export is written."""

        done: Export

    def __init__(self, model: Model, *, latest: bool = False) -> None:
        super().__init__(model)
        self._latest = latest
        self._drawn: tuple[LocatedState, int, int] | None = None
        self.finding = 0
        """The finding that is shown, from 0."""

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Lines(id="finding")
        yield Pane(LayerMap(id="layer-map"), title="layers × rows", id="map")
        yield Pane(VirtualTable(id="around-table"), title="around the origin", id="around")
        yield reading("evidence", id="evidence-body")

    @property
    def located(self) -> LocatedState | None:
        if self.model.state.job is not None and self.model.state.job.kind == "locate":
            return None
        return self.model.state.latest_located if self._latest else self.model.located

    @property
    def tells_trouble(self) -> bool:
        """Why a capture failed stands in the place of what it would have found."""
        return self.located is None

    def situation(self) -> Situation:
        """With the finding that is shown."""
        found = self.located
        findings = mappings(found.result.get("findings")) if found is not None else []
        shown = findings[self.finding] if self.finding < len(findings) else None
        return replace(
            super().situation(),
            findings=len(findings),
            not_replayable=words.not_replayable(shown) if shown is not None else "",
        )

    def draw(self) -> None:
        found = self.located
        self.set_class(found is None, "working")
        if found is None:
            self._draw_progress()
            return
        width = self.size.width
        said = [
            part
            for line in (*words.summary_lines(found, self.finding), *self._doing())
            for part in wrap(visible(line), width - 1, indent=" ")
        ]
        self.query_one("#finding", Lines).show("\n".join(said))
        if (found, self.finding, width) == self._drawn:
            return
        self._drawn = (found, self.finding, width)
        self.query_one("#title", Lines).show(shortened(visible(words.title_line(found)), width, more=" · …"))
        labels, positions, cells = words.read_map(found.result.get("map"))
        self.query_one(LayerMap).show(labels, positions, cells)
        entitle(self.query_one("#map", Pane), f"layers × rows  {LEGEND}" if labels else "layers × rows")
        self._draw_around(found)
        replay = words.replay_of(found, self.finding)
        lines = words.replay_lines(replay, width - 2) if replay is not None else []
        lines += wrapped(words.evidence_paragraphs(found, self.finding), max(width - 2, 20))
        self.query_one("#evidence", Lines).show("\n".join(map(visible, lines)))

    def on_layer_map_moved(self, _message: LayerMap.Moved) -> None:
        entitle(self.query_one("#map", Pane), subtitle=self.query_one(LayerMap).under_cursor)

    def go_to(self, layer: str, module: str) -> None:
        """Put the cursor on an operator around the origin, else on a layer of the map."""
        around = mappings(self.located.result.get("around")) if self.located is not None else []
        row = next(
            (index for index, one in enumerate(around) if module and one.get("module") == module), None
        )
        if row is not None:
            table = self.query_one("#around-table", VirtualTable)
            table.filter("")
            table.move_to_key(row)
            table.focus()
            return
        layers = self.query_one(LayerMap)
        if layer in layers.labels:
            layers.go_to_layer(layers.labels.index(layer))
            layers.focus()

    def _doing(self) -> tuple[str, ...]:
        """A replay in progress, in a line."""
        job = self.model.state.job
        if job is None or job.kind != "replay":
            return ()
        return (f" ◌ {wording.job(job, self.model.now)}, {key_of('cancel')} cancels",)

    def _draw_around(self, found: LocatedState) -> None:
        result = found.result
        around = mappings(result.get("around"))
        table = self.query_one("#around-table", VirtualTable)
        table.empty = "The trace holds no operators around an origin."
        born = next((i for i, row in enumerate(around) if row.get("origin")), 0)
        table.show_rows(operator_rows(around) if around else NO_ROWS, cursor_key=born)
        findings = mappings(result.get("findings"))
        first = findings[0] if findings else {}
        row = result.get("around_position")
        where = [] if first.get("layer") is None else [f"layer {first.get('layer')}"]
        where += [] if row is None else [f"row {row}", f"{result.get('around_arm') or '?'} arm"]
        head = "around the first origin" if self.finding else "around the origin"
        entitle(self.query_one("#around", Pane), " · ".join([head, *where]))

    def _draw_progress(self) -> None:
        model, job = self.model, self.model.state.job
        self.query_one("#title", Lines).show(
            f" klbench · locate · request {model.request} · {model.helper.helper}"
        )
        self._drawn = None
        if job is not None:
            bar = words.progress_bar(job.done, job.total, max(self.size.width - 30, 10))
            said = [f" ◌ {job.title}", "", f"   {wording.job(job, model.now)}"]
            said += [f"   {bar}"] if bar else []
            said += ["", "   The arms are repeated as they were measured, with the layers recorded."]
            notes = [line for line in model.state.troubles if line.at >= job.started_at]
            told = wording.trouble(notes[-1]) if notes else []
            if (asked := model.state.question) is not None:
                told = [f"The runner asks to {asked.what}.", f"{asked.why}.",
                        f"{key_of('agree')} agrees, {key_of('cancel')} cancels."]  # fmt: skip
            else:
                told.append(f"{key_of('cancel')} cancels, {key_of('back')} goes back: work goes on.")
            width = max(self.size.width - 1, 20)
            said += [part for line in told for part in wrap(f"   {visible(line)}", width, indent="   ")]
        else:
            last = model.state.last_job
            said = [" Nothing was located for this request yet.", ""]
            if last is not None and last.kind == "locate" and last.outcome != "done":
                said = [f" The capture ended: {last.outcome}.", ""]
                errors = [line for line in model.state.troubles if line.level == "error"]
                said += [f"   {line}" for line in (wording.trouble(errors[-1]) if errors else [])]
            said += ["", f"   {key_of('back')} goes back"]
        self.query_one("#finding", Lines).show("\n".join(said))

    def do_agree(self) -> None:
        self.post_message(Send(cmd.Confirm()))

    def do_cancel(self) -> None:
        self.post_message(Send(cmd.Cancel()))

    def do_next_finding(self) -> None:
        self.finding = (self.finding + 1) % self.situation().findings
        self.show_model()

    def do_replay(self) -> None:
        """Ask the runner; what comes of it is in the log of the session, and then here."""
        if (found := self.located) is not None:
            self.post_message(Send(cmd.Replay(locate=found.number, finding=self.finding)))

    def do_numbers(self) -> None:
        """Read the rows that the capture kept."""
        found, number, folder = self.located, self.finding, self.model.folder
        if found is None or folder is None:
            return

        def read() -> None:
            try:
                finding = finding_of(found, number)
                rows = origin_numbers(trace_dir_of(folder, found), number)
            except KlbenchError as error:
                self.post_message(Failed(error))
            else:
                positions = finding.get("positions")
                row = positions.get("first") if isinstance(positions, dict) else "?"
                title = f"{finding.get('module')} · row {row}"
                self.post_message(self.NumbersRead(rows, title, str(finding.get("arm") or "generation")))

        self.app.run_worker(read, thread=True, group="numbers", exit_on_error=False)

    def on_origin_screen_numbers_read(self, message: NumbersRead) -> None:
        self.app.push_screen(NumbersScreen(self.model, message.rows, message.title, message.arm))

    def do_export(self) -> None:
        """Write the origin's folder; no server is needed."""
        found, number, folder = self.located, self.finding, self.model.folder
        if found is None or folder is None:
            return

        def write() -> None:
            try:
                self.post_message(self.Exported(export_located(folder, found, number)))
            except KlbenchError as error:
                self.post_message(Failed(error))
            except OSError as error:
                refused = UndecidedError("the export cannot be written", why=str(error))
                self.post_message(Failed(refused))

        self.app.run_worker(write, thread=True, group="export", exit_on_error=False)

    def on_origin_screen_exported(self, message: Exported) -> None:
        done = message.done
        text = f"written: {done.folder}, python show.py there shows the difference"
        if done.why_not:
            text += f"; it compares the recorded outputs alone: {done.why_not}"
        self.app.notify(text, markup=False, timeout=10)
