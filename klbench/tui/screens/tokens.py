"""The tokens of one request: where in the generation they differ and what that shape says."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from textual.widget import Widget

from klbench.core.text import kl, shortened
from klbench.tui.actions import bindings
from klbench.tui.measurement import Measurement
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.text import Lines, Pane, Sentences, entitle
from klbench.tui.widgets.token_view import TokenView
from klbench.tui.widgets.virtual_table import VirtualTable


class TokensScreen(WorkScreen):
    """Shows the model's chosen request."""

    place = "tokens"
    BINDINGS = bindings("tokens")
    AUTO_FOCUS = "TokenView VirtualTable"

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield Pane(TokenView(id="token-view"), title="tokens", id="tokens")
        yield Sentences(id="sentences")

    def draw(self) -> None:
        measured, request = self.model.measurement, self.model.request
        view = self.query_one(TokenView)
        view.show(measured, request)
        if self.model.offset is not None and measured is not None:
            view.table.move_to_key(self.model.offset)
            self.model.offset = None
        entitle(self.query_one("#tokens", Pane), "difference by token position", view.place)
        if measured is None or request is None:
            self.query_one("#title", Lines).show(" klbench · tokens")
            return
        c = measured.columns
        words = [
            "klbench",
            f"request {request}",
            c.helper,
            f"prompt {c.prompt_len[request]}",
            f"cached {c.cached_generation[request]}",
            f"{measured.differing[request]} of {measured.compared[request]} differ",
            "dropped"
            if c.dropped[request]
            else f"kl {kl(float(measured.kl_nats[request]) if measured.compared[request] else None)}",
        ]
        self.query_one("#title", Lines).show(shortened(" " + " · ".join(words), self.size.width, more=" · …"))
        said = describe_shape(measured, request)
        self.query_one("#sentences", Sentences).say(said)

    def on_virtual_table_highlighted(self, _message: VirtualTable.Highlighted) -> None:
        entitle(self.query_one("#tokens", Pane), subtitle=self.query_one(TokenView).place)

    def do_next_difference(self) -> None:
        self._step(1)

    def do_previous_difference(self) -> None:
        self._step(-1)

    def _step(self, step: int) -> None:
        if (said := self.query_one(TokenView).next_difference(step)) is not None:
            self.say(said)


def describe_shape(measured: Measurement, request: int) -> list[str]:
    """What the place of the differences in the generation says, in one or two sentences."""
    differs = measured.differs[measured.columns.tokens_of(request)]
    where = np.flatnonzero(differs)
    compared, lost = int(measured.compared[request]), bool(measured.columns.lost[request])
    if not len(differs):
        return ["Nothing of this request was compared: the helper left it out."]
    if not compared:
        return ["Nothing of this request was compared: the server lost its only logprob."]
    if not len(where):
        every = "Every token but the first, whose logprob the server lost," if lost else "Every token"
        return [f"{every} has the same logprob in both arms, bit for bit."]
    prompt = int(measured.columns.prompt_len[request])
    first, last = int(where[0]), int(where[-1])
    if lost and first == 1:
        return [
            f"It shows from the first token on that was compared, in {len(where)} of {compared}.",
            "The server lost the logprob of the token before it: whether it began with the generation or "
            "with its first decode is not known.",
        ]
    if first > 0:
        position = prompt + first
        return [
            f"Equal up to offset {first}: the first difference is token {position}, scored by row "
            f"{position - 1} (K/V length {position}).",
            "It was born while decoding, or at an edge that this position crosses.",
        ]
    if len(where) == len(differs):
        return [
            "Contiguous from the first generated token: the state was already wrong when generation began.",
            "Nothing that happens during decode is needed to explain it.",
        ]
    return [
        f"It begins with the first generated token and shows in {len(where)} of {len(differs)}, the last "
        f"at offset {last}.",
        "The state was already different when generation began; some tokens round to the same bits.",
    ]
