"""One key after the other: a key is given to what the key before it has opened.

Over a slow line several keys come in one piece. Textual gives each of them to whatever has the focus at that
moment: of a `/` and a text the text would be keys of the table, `x` among them, and `q` and `c` would compare
instead of asking. Here a key waits until what the key before it began has been worked off.

    /kl>1e-3   the filter line opens, and the rest is typed into it

Invariants: keys keep their order; none waits longer than a quarter of a second for the one before; the same
cursor key again does not wait, as it goes where the one before went.
"""

from __future__ import annotations

from collections import deque

from textual import events
from textual.app import App

from klbench.tui.screens.one_picture import has_nothing, look_later, rests

_LOOK_S = 0.001
_MOST_LOOKS = 250
_REPEATED = frozenset(("up", "down", "left", "right", "pageup", "pagedown", "j", "k", "ctrl+d", "ctrl+u"))


class OneKey(App[int]):
    """An app whose keys wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.typed: deque[events.Key | events.Paste] = deque()
        """What was typed and waits."""
        self._looks_left = 0
        self._last = ""

    def begin_key(self, key: str) -> None:
        """Called before a key is worked off."""

    async def on_event(self, event: events.Event) -> None:
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif not self.typed and (self._goes_on(event) or self._rests):
            await self._work_off(event)
        else:
            self.typed.append(event)
            if len(self.typed) == 1:
                self._looks_left = _MOST_LOOKS
                self._look_soon()

    async def _work_off(self, event: events.Key | events.Paste) -> None:
        self._last = event.key if isinstance(event, events.Key) else ""
        if self._last:
            self.begin_key(self._last)
        await super().on_event(event)

    def _goes_on(self, event: events.Key | events.Paste) -> bool:
        return isinstance(event, events.Key) and event.key == self._last and event.key in _REPEATED

    def _look_soon(self) -> None:
        look_later(self, _LOOK_S, self._look_for_rest)

    async def _look_for_rest(self) -> None:
        self._looks_left -= 1
        if self._looks_left <= 0 or self._rests:
            self._looks_left = _MOST_LOOKS
            await self._work_off(self.typed.popleft())
            while self.typed and self._goes_on(self.typed[0]):
                await self._work_off(self.typed.popleft())
        if self.typed:
            self._look_soon()

    @property
    def _rests(self) -> bool:
        """Whether nothing is under way on the screen; this pump is at work itself: it is what asks."""
        if not self.screen_stack:
            return True
        screen = self.screen
        return has_nothing(self) and rests(screen) and all(rests(widget) for widget in screen.walk_children())
