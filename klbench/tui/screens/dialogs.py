"""Dialogs: what a user must decide before it happens. All are opaque and end with one key."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from klbench.core.text import elapsed
from klbench.tui.widgets.text import Lines
from klbench.tui.widgets.virtual_table import Column, Rows, VirtualTable


class Choice(ModalScreen[str]):
    """A question with a few answers, each with a key; dismissed with the answer's name, "" for none."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "pick('')", show=False)]
    DEFAULT_CSS = """
    Choice { align: center middle; background: $background; }
    Choice > Vertical {
        width: 66; max-width: 96%; height: auto; max-height: 96%;
        border: round $border; background: $surface; padding: 0 1;
    }
    Choice VirtualTable { height: auto; margin-top: 1; }
    Choice Lines.dim { color: $text-muted; }
    """

    def __init__(self, question: str, why: str, answers: tuple[tuple[str, str, str], ...]) -> None:
        """`answers` are (name, key, what it does)."""
        super().__init__()
        self._question, self._why, self._answers = question, why, answers

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(self._question)
            if self._why:
                yield Lines(self._why, classes="dim")
            yield VirtualTable(header=False)

    def on_mount(self) -> None:
        answers = self._answers
        columns = (
            Column("key", "key", 4, lambda row: answers[row][1]),
            Column("what", "what", 52, lambda row: answers[row][2]),
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
        question, stop = "Leave the workbench?", "end the session's work (the server is not ours: it goes on)"
        why = "The attached server is not touched."
    if job:
        why += f" A {job} is in progress."
    leave = "leave it running, come back with `klbench open`"
    return Choice(
        question,
        why,
        (("leave", "l", leave), ("stop", "s", stop), ("", "c", "stay")),
    )


def relaunch_choice(launch_s: float | None) -> Choice:
    """Capturing needs a server that was launched for it."""
    cost = (
        f"about {elapsed(launch_s)}, what the last launch took" if launch_s else "as long as a launch takes"
    )
    return Choice(
        "Relaunch the server to capture its layers?",
        "Hooks see the operators of a server that runs eagerly with klbench's plugin; this one was not "
        "launched with --ready-to-capture. The divergence is checked again before anything is captured.",
        (("relaunch", "r", f"relaunch and locate ({cost})"), ("", "c", "not now")),
    )
