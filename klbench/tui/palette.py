"""The command palette: the registry's actions of the screen, with their keys and why one cannot be done, and
the requests, layers and operators to go to."""

from __future__ import annotations

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from klbench.tui import actions
from klbench.tui.messages import GoTo
from klbench.tui.places_to_go import LayerPlace, RequestPlace, layers_of, requests_of
from klbench.tui.screens.base import WorkScreen


class PlaceProvider(Provider):
    """Leads to a request by its number, to a layer or an operator by its name."""

    async def search(self, query: str) -> Hits:
        if not isinstance(self.screen, WorkScreen):
            return
        model, matcher = self.screen.model, self.matcher(query)
        for request in requests_of(model, query):
            yield self._hit(1.0, request)
        for layer in layers_of(model):
            if (score := matcher.match(layer.name)) > 0:
                yield self._hit(score, layer)

    def _hit(self, score: float, place: RequestPlace | LayerPlace) -> Hit:
        go = partial(self.screen.post_message, GoTo(place))
        return Hit(score, Content(place.name), go, text=place.name, help=place.about)


class ActionProvider(Provider):
    """Offers what the screen under the palette can do."""

    async def discover(self) -> Hits:
        if isinstance(self.screen, WorkScreen):
            for action in actions.of_screen(self.screen.place):
                yield DiscoveryHit(
                    action.label,
                    partial(self.screen.perform, action.id),
                    text=action.label,
                    help=self._explain(action),
                )

    async def search(self, query: str) -> Hits:
        if not isinstance(self.screen, WorkScreen):
            return
        matcher = self.matcher(query)
        for action in actions.of_screen(self.screen.place):
            if (score := matcher.match(f"{action.label} {action.help}")) > 0:
                yield Hit(
                    score,
                    Content(action.label),
                    partial(self.screen.perform, action.id),
                    text=action.label,
                    help=self._explain(action),
                )

    def _explain(self, action: actions.Action) -> str:
        assert isinstance(self.screen, WorkScreen)
        answer = action.enabled(self.screen.situation())
        return f"{action.shown_key}  " + (action.help if answer is True else f"not now: {answer}")
