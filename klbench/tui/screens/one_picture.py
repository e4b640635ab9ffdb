"""A change of the layout sends one picture.

Textual draws a new screen as soon as it has a layout. Only then do its widgets learn their sizes: tables
choose columns and scroll, texts are wrapped, the window's breakpoints choose other panes, and most of the
screen is drawn two to four times more. Here a layout holds the pictures back until all that it caused has
been worked off. What was to be drawn meanwhile is noted by the compositor and goes out at once.

A key's answer is one picture, too, sent as soon as it is there: Textual would draw what moves at the next
tick of the screen's clock and what comes of that at the one after, a thirtieth of a second later.

Rules are applied once before the first picture: a screen is born with the classes of the window's size.

A screen that another covers draws nothing: Textual would have the one on top drawn again in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from textual import events
from textual.app import App
from textual.geometry import Size
from textual.message_pump import MessagePump
from textual.screen import Screen

Result = TypeVar("Result")

_LOOK_S = 0.002
_KEY_LOOK_S = 0.001
_MOST_LOOKS = 125
"""A picture is held back for a quarter of a second, whatever is still under way."""
_QUIET_LOOKS = 2
"""What a message began may come back as another in the next turn of the loop; so all must rest twice."""
_AWAITED = ("load", "compute")
"""Groups of the workers that bring what the screen is about."""


class OnePicture(Screen[Result]):
    """A screen whose pictures wait until its layout has come to rest."""

    _looks_left = 0
    """How often it is looked whether everything rests; 0 while nothing is held back."""
    _quiet_looks = 0
    _covered = False
    _for_key = False
    """What is held back answers a key, which waits for no worker."""

    def _post_register(self, app: App[Any]) -> None:
        super()._post_register(app)
        across = self._get_breakpoint_classes(app.size.width, app.HORIZONTAL_BREAKPOINTS or [])
        down = self._get_breakpoint_classes(app.size.height, app.VERTICAL_BREAKPOINTS or [])
        self.add_class(*across, *down, update=False)

    def hold_picture(self) -> None:
        """Draw nothing until what is under way has been worked off."""
        self._for_key = False
        self._hold()

    def answer_key(self) -> None:
        """Draw all that a key brings at once, when it has been worked off."""
        if not self._looks_left:
            self._for_key = True
            self._hold()

    def _hold(self) -> None:
        if not self._looks_left and self.is_attached and self.app.screen is self:
            self._looks_left, self._quiet_looks = _MOST_LOOKS, 0
            self._look_soon()

    def _look_soon(self) -> None:
        look_later(self, _KEY_LOOK_S if self._for_key else _LOOK_S, self._look_for_rest)

    def _look_for_rest(self) -> None:
        self._looks_left -= 1
        if self.app.screen is not self:
            self._looks_left = 0  # another covers it; coming back draws all of it
            return
        if self._has_work and not self._is_busy:
            # Not at the next tick of the screen's clock, which on a slow line ticks ten times a second.
            self._on_timer_update()
            self._quiet_looks = 0
        else:
            self._quiet_looks = 0 if self._is_busy else self._quiet_looks + 1
        if self._looks_left and self._quiet_looks < _QUIET_LOOKS:
            self._look_soon()
        else:
            self._looks_left = 0
            self._compositor_refresh()

    @property
    def _is_busy(self) -> bool:
        """Whether a message waits or is worked off, here or in a widget of this screen, or a thread is about
        to send one."""
        others: list[MessagePump] = [self.app, *self.walk_children()]
        # This screen's own pump is at work: it is what looks.
        if not has_nothing(self) or not all(rests(pump) for pump in others):
            return True
        return not self._for_key and any(
            worker.group in _AWAITED and not worker.is_finished for worker in self.app.workers
        )

    @property
    def _has_work(self) -> bool:
        return bool(
            self._layout_required
            or self._scroll_required
            or self._repaint_required
            or self._recompose_required
            or self._dirty_widgets
            or self._callbacks
        )

    def _on_screen_resume(self, event: events.ScreenResume) -> None:
        event.refresh_styles = self._covered  # a new screen has just got its rules
        self._covered = False
        self.hold_picture()

    def on_screen_suspend(self) -> None:
        self._covered = True

    @property
    def _is_seen(self) -> bool:
        """Whether nothing covers it but what shows it through."""
        top = self.app.screen
        return not self._covered or (top is not self and top.styles.background.a < 1)

    def _refresh_layout(self, size: Size | None = None, scroll: bool = False) -> None:
        if not scroll:
            self.hold_picture()
        super()._refresh_layout(size, scroll)

    def _compositor_refresh(self) -> None:
        if self._looks_left or not self._is_seen:
            self._dirty_widgets.clear()  # the compositor has noted where they are; coming back draws all
        else:
            super()._compositor_refresh()


def look_later(pump: MessagePump, after_s: float, look: Callable[[], Any]) -> None:
    """Have the pump call `look` after a moment.

    A timer of Textual's is lost where the process is kept waiting for longer than the timer takes while it
    starts: it has missed its only tick then.
    """
    asyncio.get_running_loop().call_later(after_s, pump.call_next, look)


def rests(pump: MessagePump) -> bool:
    """Whether a pump waits for its next message. One that works a message off, or has not begun, waits for
    nothing and has nothing in its queue: an empty queue alone would depend on who runs first."""
    return bool(pump._message_queue.ready_event._waiters) and has_nothing(pump)


def has_nothing(pump: MessagePump) -> bool:
    """Whether nothing waits for a pump: in its queue, or taken from there to see whether the message before
    can be left out."""
    return pump._pending_message is None and not pump._message_queue.qsize() + len(pump._next_callbacks)
