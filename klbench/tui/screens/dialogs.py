"""Dialogs: what a user must decide before it happens. All are opaque and end with one key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget

from klbench.core.text import elapsed, shortened, visible
from klbench.tui.actions import key_of
from klbench.tui.screens.overlay import Overlay
from klbench.tui.widgets.text import Lines
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable


class Choice(Overlay[str]):
    """A question with a few answers, each with a key; dismissed with the answer's name, "" for none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "pick('')", show=False),
        Binding("ctrl+c", "app.help_quit", show=False),
    ]
    DEFAULT_CSS = """
    Choice > Vertical { width: 66; height: auto; max-height: 96%; }
    Choice VirtualTable { height: auto; margin-top: 1; }
    Choice Lines.dim { color: $text-muted; }
    """

    def __init__(self, question: str, why: str, answers: tuple[tuple[str, str, str], ...]) -> None:
        """`answers` are (name, key, what it does); the last in 45 cells at most, which the smallest window
        has room for."""
        super().__init__()
        self._question, self._why, self._answers = question, why, answers

    def content(self) -> Iterable[Widget]:
        why = [Lines(self._why, classes="dim")] if self._why else []
        yield Vertical(Lines(self._question), *why, VirtualTable(header=False))

    def on_mount(self) -> None:
        answers = self._answers
        columns = (
            Column("key", "key", 4, lambda row: answers[row][1]),
            Column("what", "what", max(len(what) for _, _, what in answers), lambda row: answers[row][2]),
        )
        table = self.query_one(VirtualTable)
        table.styles.height = len(answers)
        table.show_rows(Rows(columns, len(answers)))
        table.focus()
        for name, key, _ in answers:
            self._bindings.bind(key, f"pick({name!r})", show=False, priority=True)

    def on_virtual_table_chosen(self, message: VirtualTable.Chosen) -> None:
        self.dismiss(self._answers[message.row][0])

    def action_pick(self, name: str) -> None:
        self.dismiss(name)


def quit_choice(*, ours: bool, job: str, launch_s: float | None) -> Choice:
    """Stop the server, leave it running, or stay."""
    cost = f" Its launch took {elapsed(launch_s)}." if launch_s else ""
    if ours:
        question, stop = "Leave the workbench?", "stop the server and end the session's work"
        why = f"The server runs in a process of its own.{cost}"
    else:
        question, stop = "Leave the workbench?", "end the session's work (the server goes on)"
        why = "The attached server is not ours and is not touched."
    if job:
        why += f" A {job} is in progress."
    leave = "leave it running (back with `klbench open`)"
    return Choice(
        question,
        why,
        (("leave", "l", leave), ("stop", "s", stop), ("", "c", "stay")),
    )


def cancel_choice(title: str) -> Choice:
    """What is in progress: cancel it, or let it go on."""
    return Choice(
        f"Cancel this? {visible(title)}",
        "What it has measured is kept, and the server stays.",
        (
            ("cancel", "x", "cancel it"),
            ("", "c", "let it go on"),
            ("leave", "l", "leave the workbench; it goes on"),
        ),
    )


def tour_choice() -> Choice:
    """The first start."""
    return Choice(
        "First time here?",
        "A tour of about two minutes: the real sglang on this machine, with a defect planted on purpose, "
        "from its launch to the operator where the difference was born.",
        (("tour", "t", "take the tour"), ("", "c", f"look around ({key_of('tour')} begins the tour later)")),
    )


def open_choice(texts: tuple[tuple[str, str], ...], pager: str, editor: str) -> Choice:
    """Which text, as (name, what it is), in which program; dismissed with "pager NAME" or "editor NAME"."""
    keys = {"log": "l", "commands": "c", "report": "r", "body": "b"}
    pager, editor = (shortened(visible(program), 16) for program in (pager, editor))
    reading = tuple((f"pager {name}", keys[name], f"{title} in {pager}") for name, title in texts)
    editing = tuple((f"editor {name}", keys[name].upper(), f"{title} in {editor}") for name, title in texts)
    return Choice(
        "Open in another program?",
        "The workbench comes back when the program ends; what runs goes on.",
        (*reading, *editing, ("", "n", "not now")),
    )


def control_choice(who: str) -> Choice:
    """Take control from another terminal."""
    return Choice(
        "Take control from the other terminal?",
        f"{who}. It goes on to show the session, but commands nothing any more; what runs goes on.",
        (("take", "t", "take control"), ("", "c", "go on watching")),
    )


def repeat_choice(launch_s: float | None) -> Choice:
    """The same command once more, with the code as it is now."""
    cost = f"about {elapsed(launch_s)}" if launch_s else "as long as a launch takes"
    return Choice(
        "The same once more, in a new session?",
        f"Its server is launched anew ({cost}), so that it runs the code as it is now. This session is kept.",
        (
            ("stop", "s", "stop this session's server first"),
            ("keep", "b", "let both run (there must be memory for two)"),
            ("", "c", "not now"),
        ),
    )


def relaunch_choice(launch_s: float | None) -> Choice:
    """Capturing needs a server that was launched for it."""
    cost = f"about {elapsed(launch_s)}, as the last launch did" if launch_s else "as long as any launch"
    return Choice(
        "Relaunch the server to capture its layers?",
        "Hooks see the operators of a server that runs eagerly with klbench's plugin; this one was not "
        "launched with --ready-to-capture. The divergence is checked again before anything is captured. "
        f"It takes {cost}.",
        (("relaunch", "r", "relaunch and locate"), ("", "c", "not now")),
    )
