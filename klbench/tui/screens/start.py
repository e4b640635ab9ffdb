"""The start screen: the demo, a model to launch, a server to attach to, sessions to come back to.

Each form shows, as it is filled, the command that does the same without the workbench, and says what will be
done to whose server before anything is.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Input

import klbench
from klbench.defaults import DEMO_MAX_NEW_TOKENS, DEMO_PROMPT_TOKENS
from klbench.engine.demo_faults import checked_faults, faults_of, fitting_samples
from klbench.engine.path_map import read_path_map
from klbench.errors import KlbenchError, UsageError
from klbench.insitu.faults_catalogue import CATALOGUE, PAIR_CATALOGUE
from klbench.session.request import Options, StartRequest, Target
from klbench.session.survey import SessionSummary
from klbench.tui.actions import bindings, key_of
from klbench.tui.messages import Failed, OpenSession, StartWork
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.tables import session_rows
from klbench.tui.widgets.field import Field
from klbench.tui.widgets.text import Lines, Pane, Paragraphs, Sentences, entitle
from klbench.tui.widgets.virtual_table import NO_ROWS, Column, Rows, VirtualTable
from klbench.zoo import Kind

MODELS: tuple[tuple[Kind, str], ...] = (
    ("dense", "Qwen3: attention over everything before"),
    ("moe", "Qwen3-MoE: a router chooses experts"),
    ("swa", "Gemma3: layers with a window of 64 tokens"),
    ("hybrid", "LFM2: short convolutions, some attention"),
)
FAULTS: tuple[tuple[str, tuple[str, str]], ...] = (
    ("", ("No fault: the real sglang on this machine, all three helpers", "should read exactly 0.")),
    *((name, fault.explanation) for name, fault in (CATALOGUE | PAIR_CATALOGUE).items()),
)
PANES = ("demo", "launch", "attach", "sessions")

# Each helper flushes before generating and before scoring. match has 2 arms, the others 3; of these 8 passes
# four generate: one each, and the warming arm of decode_cache_hit.
_FLUSHES, _PASSES, _GENERATING = 6, 8, 4


class StartScreen(WorkScreen):
    """Four panes; a narrow window shows one of them at a time."""

    place = "start"
    BINDINGS = bindings("start")
    AUTO_FOCUS = "#models"

    def __init__(self, model: Model, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` are fields of `Options` that the user has set once."""
        super().__init__(model)
        self._defaults = dict(defaults or {})
        self.summaries: list[SessionSummary] = []
        self.machine = "Looking at what this machine can do."
        self._active = "demo"

    def content(self) -> Iterable[Widget]:
        yield Lines(f" klbench {klbench.__version__} · where do prefill and decode disagree?", id="title")
        yield Sentences(id="machine")
        yield Lines(id="tabs")
        with Horizontal(classes="row"):
            yield Pane(
                Horizontal(VirtualTable(id="models"), VirtualTable(id="faults"), id="choices"),
                Paragraphs(id="demo-text"),
                title="[1] demo",
                id="demo",
                classes="active",
            )
            yield Pane(
                *_field("model path or hub name", "model-path", "for example /models/Qwen3-8B"),
                *_field("sglang arguments, they win over ours", "arguments", "for example --tp 2"),
                *_field("server's Python, empty to find one", "server-python", ""),
                Paragraphs(id="launch-text"),
                title="[2] launch",
                id="launch",
            )
        with Horizontal(classes="row"):
            yield Pane(
                *_field("URL of a running server", "url", "http://127.0.0.1:30000"),
                *_field(
                    "server's folders = here, where it sees others", "path-maps", "for example /models=/mnt/m"
                ),
                Paragraphs(id="attach-text"),
                title="[3] attach",
                id="attach",
            )
            yield Pane(
                VirtualTable(id="known", empty="No sessions yet: whatever you start is kept here."),
                Paragraphs(id="known-text"),
                title="[4] sessions",
                id="sessions",
            )

    def on_mount(self) -> None:
        models = Rows(
            (
                Column("model", "model", 6, lambda row: MODELS[row][0]),
                Column("what", "what it is", 24, lambda row: MODELS[row][1], stretch=30, sentence=True),
            ),
            len(MODELS),
        )
        self.query_one("#models", VirtualTable).show_rows(models)
        self._offer_faults()
        if python := self._defaults.get("server_python"):
            self.query_one("#server-python", Input).value = str(python)
        super().on_mount()

    def draw(self) -> None:
        self.query_one("#machine", Sentences).say([self.machine], mark=" ")
        for name in PANES:
            self.query_one(f"#{name}").set_class(name == self._active, "active")
        for row in self.query(".row"):
            row.set_class(any(pane.id == self._active for pane in row.query(Pane)), "has-active")
        tabs = "   ".join(
            f"▸[{number}] {name}" if name == self._active else f" [{number}] {name}"
            for number, name in enumerate(PANES, 1)
        )
        self.query_one("#tabs", Lines).show(f" {tabs}")
        self._draw_demo()
        self._draw_launch()
        self._draw_attach()

    def show_sessions(self, summaries: list[SessionSummary]) -> None:
        self.summaries = summaries
        ages = [_age(self.model.now - summary.created_at) for summary in summaries]
        table = self.query_one("#known", VirtualTable)
        table.show_rows(session_rows(summaries, ages) if summaries else NO_ROWS)
        running = sum(summary.status == "running" for summary in summaries)
        words = f"{len(summaries)} kept" + (f", {running} running" if running else "")
        entitle(self.query_one("#sessions", Pane), subtitle=words)

    # What each form would start

    def demo(self) -> StartRequest:
        model, fault = self._chosen_model(), FAULTS[self._chosen_fault()][0]
        if fault not in faults_of(model):
            # The model was changed a moment ago, and the list of faults follows.
            fault = ""
        options = self._options(
            prompt_tokens=DEMO_PROMPT_TOKENS,
            max_new_tokens=DEMO_MAX_NEW_TOKENS,
            fault=fault or None,
            ready_to_capture=True,
        )
        if fault:
            samples = fitting_samples(checked_faults(fault, model), options.samples)
            options = msgspec.structs.replace(options, samples=samples)
        return StartRequest(target=Target(kind="demo", model=model), options=options)

    def _chosen_model(self) -> Kind:
        return MODELS[self.query_one("#models", VirtualTable).row or 0][0]

    def _chosen_fault(self) -> int:
        """Its place in FAULTS."""
        table = self.query_one("#faults", VirtualTable)
        return table.rows.key(table.row) if table.row is not None else 0

    def _offer_faults(self) -> None:
        """Those that have a place in the chosen model; the chosen one stays where it is among them."""
        fitting = {"", *faults_of(self._chosen_model())}
        offered = [place for place, (name, _) in enumerate(FAULTS) if name in fitting]
        before = self._chosen_fault()
        column = Column(
            "fault", "planted fault", 16, stretch=20, show=lambda row: FAULTS[offered[row]][0] or "none"
        )
        rows = Rows((column,), len(offered), np.array(offered))
        self.query_one("#faults", VirtualTable).show_rows(rows, cursor_key=before if before in offered else 0)
        entitle(self.query_one("#demo", Pane), subtitle=f"{len(offered) - 1} faults to plant in this model")

    def launch(self) -> StartRequest:
        """Raises UsageError where the form cannot be understood."""
        path = self._value("model-path")
        if not path:
            raise UsageError("name a model to launch", next="a folder, or a name on the hub")
        arguments = _words(self._value("arguments"), "the sglang arguments")
        return StartRequest(
            target=Target(kind="launch", model_path=path, arguments=arguments),
            options=self._options(ready_to_capture=True, server_python=self._value("server-python") or None),
        )

    def attach(self) -> StartRequest:
        """Raises UsageError where there is no URL, or a folder's pair is none."""
        url = self._value("url")
        if not url.startswith(("http://", "https://")):
            raise UsageError("name the server's URL", next="for example http://127.0.0.1:30000")
        maps = _words(self._value("path-maps"), "the folders")
        options = self._options(path_maps=read_path_map(maps).spelled)
        return StartRequest(target=Target(kind="url", url=url), options=options)

    def _options(self, **chosen: Any) -> Options:
        return Options(**(self._defaults | chosen))

    def on_virtual_table_highlighted(self, message: VirtualTable.Highlighted) -> None:
        if message.table.id == "models":
            self._offer_faults()
        if message.table.id in ("models", "faults"):
            self._draw_demo()
        if message.table.id == "known":
            self._draw_known(message.row)

    def open_row(self, table: VirtualTable, row: int) -> None:
        if table.id == "known":
            self.post_message(OpenSession(self.summaries[row].folder.path))
        else:
            self.post_message(StartWork(self.demo()))

    def on_input_changed(self, _message: Input.Changed) -> None:
        self._draw_launch()
        self._draw_attach()

    def on_input_submitted(self, message: Input.Submitted) -> None:
        self._submit("attach" if message.input.id in ("url", "path-maps") else "launch")

    def _submit(self, pane: str) -> None:
        try:
            start = self.attach() if pane == "attach" else self.launch()
        except KlbenchError as error:
            self.post_message(Failed(error))
            return
        self.post_message(StartWork(start))

    def on_descendant_focus(self) -> None:
        super().on_descendant_focus()
        focused = self.focused
        pane = next((n for n in focused.ancestors if isinstance(n, Pane)), None) if focused else None
        if pane is not None and pane.id and pane.id != self._active:
            self._active = pane.id
            self.draw()

    def do_pane_1(self) -> None:
        self._open("demo")

    def do_pane_2(self) -> None:
        self._open("launch")

    def do_pane_3(self) -> None:
        self._open("attach")

    def do_pane_4(self) -> None:
        self._open("sessions")

    def do_leave_field(self) -> None:
        self._open("demo")

    def do_begin(self) -> None:
        """Start what the active pane shows."""
        known = self.query_one("#known", VirtualTable)
        if self._active == "sessions":
            known.action_choose()
        elif self._active == "demo":
            self.post_message(StartWork(self.demo()))
        else:
            self._submit(self._active)

    def _open(self, name: str) -> None:
        self._active = name
        self.draw()
        self.focus_in(f"#{name}")

    def _value(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()

    def _draw_demo(self) -> None:
        table = self.query_one("#faults", VirtualTable)
        if table.row is None or self.query_one("#models", VirtualTable).row is None:
            return
        name, explanation = FAULTS[self._chosen_fault()]
        first = f"{name}: {explanation[0]}" if name else explanation[0]
        self.query_one("#demo-text", Paragraphs).show_all(
            f"{first} {explanation[1]}",
            f"$ {self.demo().command_line()}",
            f"{key_of('begin')} starts it, {key_of('next_field')} goes on.",
        )

    def _draw_known(self, row: int) -> None:
        """All of what the table has no room for, of the session under the cursor."""
        summary = self.summaries[row]
        found = summary.found or summary.doing or "nothing measured"
        self.query_one("#known-text", Paragraphs).show_all(
            f"{summary.label} · {found}", f"$ klbench open {shlex.quote(summary.folder.path.name)}"
        )

    def _draw_launch(self) -> None:
        text = self.query_one("#launch-text", Paragraphs)
        try:
            start = self.launch()
        except KlbenchError as error:
            text.show_all(f"{error.what}: {error.next or error.why}")
            return
        text.show_all(
            f"$ {start.command_line()}",
            "Deterministic, eager and with klbench's plugin, so that layers can be captured without a second "
            "launch.",
            f"{key_of('begin')} launches it.",
        )

    def _draw_attach(self) -> None:
        options = self._options()
        tokens = _GENERATING * options.samples * options.max_new_tokens
        what = (
            f"On that server: {_FLUSHES} flushes of its cache and {_PASSES} passes over {options.samples} "
            f"prompts of about {options.prompt_tokens} tokens, {tokens:,} generated in all. Its running and "
            "queued requests are shown, and you are asked, before the first flush."
        )
        rest: tuple[str, ...]
        try:
            rest = (f"$ {self.attach().command_line()}", f"{key_of('begin')} attaches.")
        except KlbenchError as error:
            rest = (", ".join(part for part in (error.what, error.why, error.next) if part),)
        self.query_one("#attach-text", Paragraphs).show_all(what, *rest)


def _field(label: str, name: str, example: str) -> tuple[Widget, ...]:
    field = Field(id=name, placeholder=example)
    return (Vertical(Lines(f" {label}", classes="label"), field, classes="field"),)


def _words(typed: str, what: str) -> tuple[str, ...]:
    """A field's words as a shell would split them. Raises UsageError for quotes that do not end."""
    try:
        return tuple(shlex.split(typed))
    except ValueError as error:
        raise UsageError(f"{what} cannot be split", why=str(error), next="close the quotes") from error


def _age(seconds: float) -> str:
    """`3 min ago`."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
