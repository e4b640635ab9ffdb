"""What the palette can lead to beside actions: requests by their number, layers and operators by their name.

request 12 · prefill_cache_hit     119 of 128 differ · prompt 132
layer 1                            in the map of request 23's origin
model.layers.1.self_attn.o_proj    around request 23's origin
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from klbench.core.text import counted, visible
from klbench.tui.measurement import Measurement
from klbench.tui.model import Model
from klbench.tui.origin_words import map_layers
from klbench.tui.verdict_words import mappings

_REQUEST = re.compile(r"(?:req(?:uest)?|#)?\s*(\d{1,9})", re.IGNORECASE)
MOST_NAMED = 200


@dataclass(frozen=True, slots=True)
class RequestPlace:
    """A request of a helper of the latest run."""

    helper: str
    request: int
    name: str
    about: str


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer of the latest origin's map (`module` is empty), or an operator around that origin."""

    layer: str
    module: str
    name: str
    about: str


def requests_of(model: Model, typed: str) -> list[RequestPlace]:
    """The requests that a typed number names, the shown helper's first; none for anything but a number."""
    found = _REQUEST.fullmatch(typed.strip())
    if found is None or model.run is None:
        return []
    number, run = int(found[1]), model.run.number
    shown = model.helper.helper
    measured = [m for (of, _), m in model.measurements.items() if of == run and number < m.columns.requests]
    measured.sort(key=lambda one: one.columns.helper != shown)
    return [_request(one, number) for one in measured]


def _request(measured: Measurement, request: int) -> RequestPlace:
    c = measured.columns
    compared = int(measured.compared[request])
    about = f"{measured.differing[request]} of {counted(compared, 'token differs', 'tokens differ')}"
    return RequestPlace(
        c.helper, request, f"request {request} · {c.helper}", f"{about} · prompt {c.prompt_len[request]}"
    )


def layers_of(model: Model) -> Iterator[LayerPlace]:
    """The layers and operators that the latest origin's screen shows, in its order."""
    found = model.state.latest_located
    if found is None:
        return
    whose = f"request {found.request}'s origin"
    for label in map_layers(found.result.get("map"))[:MOST_NAMED]:
        yield LayerPlace(label, "", visible(label), f"in the map of {whose}")
    for row in mappings(found.result.get("around"))[:MOST_NAMED]:
        module = row.get("module")
        if isinstance(module, str):
            yield LayerPlace("", module, visible(module), f"around {whose}")
