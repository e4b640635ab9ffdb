"""What the screens that analyse a helper's numbers share: one helper at a time, computed off the UI thread.

A subclass computes in `compute` (pure, in a worker thread: a million tokens take a moment) and draws the
result in `show`. What was computed is kept until the measurement, the server or the window's width changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from textual.message import Message
from textual.worker import Worker

from klbench.core.text import shortened, visible
from klbench.tui.measurement import Measurement
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.text import Lines


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """What is analysed: one helper's measurement, its server, and a window `width` cells wide."""

    measured: Measurement
    server: Mapping[str, Any]
    width: int


class AnalysisScreen(WorkScreen):
    """Base of the analysis screens."""

    heading = ""
    """What the screen shows, for its title."""

    @dataclass
    class Computed(Message):
        """`result` of `compute` for the subject that `key` names."""

        key: tuple[object, ...]
        result: Any

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._asked: tuple[object, ...] | None = None
        self._computing: Worker[None] | None = None

    def compute(self, subject: Subject) -> Any:
        """The result for one helper; no widget may be touched."""
        raise NotImplementedError

    def show(self, result: Any) -> None:
        """Draw a result."""
        raise NotImplementedError

    def show_nothing(self, why: str) -> None:
        """Draw that there is no result."""
        raise NotImplementedError

    def draw(self) -> None:
        measured, helper = self.model.measurement, self.model.helper
        words = ["klbench", self.heading, helper.helper]
        if measured is not None:
            dirty = int((measured.differing > 0).sum())
            words += [f"{dirty} of {measured.columns.requests} requests differ"]
            words += [f"{int(measured.differing.sum())} of {int(measured.compared.sum())} tokens"]
        self.query_one("#title", Lines).show(
            shortened(visible(" " + " · ".join(words)), self.size.width, more=" · …")
        )
        if measured is None:
            self._asked = None
            self.show_nothing(self._why_nothing())
            return
        key = (id(measured), self.size.width, repr(sorted(self.model.state.server.facts.items(), key=str)))
        if key != self._asked:
            self._asked = key
            subject = Subject(measured, dict(self.model.state.server.facts), self.size.width)

            def work() -> None:
                self.post_message(self.Computed(key, self.compute(subject)))

            self._computing = self.app.run_worker(work, thread=True, group="compute", exit_on_error=False)

    def on_unmount(self) -> None:
        """Nobody waits for what is computed any more."""
        if self._computing is not None:
            self._computing.cancel()

    def on_analysis_screen_computed(self, message: Computed) -> None:
        if message.key == self._asked:
            self.show(message.result)
            self.show_hints()

    def _why_nothing(self) -> str:
        helper = self.model.helper
        if helper.columns:
            return "Loading the tokens."
        reason = (helper.result or {}).get("reason")
        return f"{helper.helper} was not compared: {reason}" if reason else "Nothing was measured yet."

    def do_next_helper(self) -> None:
        """Go on with the next helper that has token columns."""
        names = [helper.helper for helper in self.model.helpers if helper.columns]
        if len(names) < 2:
            self.app.notify("no other helper was compared", markup=False, timeout=3)
            return
        here = names.index(self.model.helper.helper) if self.model.helper.helper in names else -1
        self.model.chosen_helper = names[(here + 1) % len(names)]
        self.model.request = None
        self.show_model()
