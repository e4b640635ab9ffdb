"""Works a selftest's plan off, one server after the other; each result is on disk before the next begins.

Invariants: what is done is not done again; a server that dies or hangs costs the case at hand and is started
again; a cancelled selftest keeps what it has and leaves no server behind.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from klbench.core.text import elapsed
from klbench.errors import KlbenchError, ServerError
from klbench.session.selftest.document import Document, key_of
from klbench.session.selftest.lab import Lab
from klbench.session.selftest.plan import Case, Station, Workload, size

_DEATHS = 3
"""A server that died so often is not started again for the same station."""

_CASE_LIMIT_S = 1800.0
"""No case takes a thirtieth of this on a quiet machine of two cores: its server hangs."""

Say = Callable[[str], None]


class Drive:
    """One selftest at work. Sessions go below `folder`."""

    def __init__(
        self,
        stations: Sequence[Station],
        document: Document,
        *,
        folder: Path,
        new_tokens: int,
        say: Say,
        server_python: str | None = None,
    ) -> None:
        self._stations = stations
        self._document = document
        self._folder = folder
        self._new_tokens = new_tokens
        self._say = say
        self._server_python = server_python
        self._numbers = itertools.count(1)
        self._took_s: list[float] = []
        self._launches_s: list[float] = []
        self._total = size(stations)

    async def run(self) -> None:
        """Does all that is left."""
        for station in self._stations:
            deaths = 0
            while left := self._left(station):
                try:
                    await self._station(station, left)
                except ServerError as error:
                    deaths += 1
                    self._say(f"{_server(station)}: {error.what} · {error.why}")
                    if deaths >= _DEATHS:
                        self._give_up(station, error)
                        break

    def _left(self, station: Station) -> list[Case | Workload]:
        done = self._document.done
        return [what for what in station.everything if key_of(_empty(station, what)) not in done]

    async def _station(self, station: Station, left: Sequence[Case | Workload]) -> None:
        """Starts the station's server and works off what is left. Raises ServerError where it is gone."""
        began = time.monotonic()
        self._say(f"{_server(station)}: starting the server")
        lab = Lab(
            station.model,
            station.configuration,
            folder=self._folder / f"{next(self._numbers)}-{station.model}",
            new_tokens=self._new_tokens,
            server_python=self._server_python,
        )
        async with lab:
            self._launches_s.append(time.monotonic() - began)
            self._document.seen(lab.facts)
            for what in left:
                try:
                    entry = await _limited(lab.case(what) if isinstance(what, Case) else lab.clean(what))
                except ServerError as error:
                    self._keep(_empty(station, what) | {"why": f"{error.what}: {error.why}"}, what)
                    raise
                # The boundary of a case: a defect of klbench is a result, and no reason to judge no more.
                except Exception as error:
                    entry = _empty(station, what) | {"why": f"klbench failed: {_in_words(error)}"}
                self._took_s.append(entry["elapsed_s"])
                self._keep(entry, what)

    def _keep(self, entry: dict[str, Any], what: Case | Workload) -> None:
        self._document.add(entry, clean=isinstance(what, Workload))
        done = len(self._document.done)
        answer = str(entry["answer"]).replace("_", " ")
        if entry.get("marks", {}).get("condition") == "right":
            answer += f", condition {entry['grade']}"
        parts = [
            f"[{done}/{self._total}] {entry['model']} · {entry['configuration']} · {entry['workload']}",
            "clean" if entry["fault"] == "none" else str(entry["fault"]),
            answer,
            *([str(entry["why"])] if entry["why"] else []),
            f"about {elapsed(self._eta_s())} left",
        ]
        self._say(" · ".join(parts))

    def _eta_s(self) -> float:
        done = self._document.done
        servers = cases = 0
        for station in self._stations:
            left = sum(key_of(_empty(station, what)) not in done for what in station.everything)
            cases += left
            servers += bool(left)
        return cases * _mean(self._took_s) + max(0, servers - 1) * _mean(self._launches_s)

    def _give_up(self, station: Station, error: KlbenchError) -> None:
        for what in self._left(station):
            self._keep(_empty(station, what) | {"why": f"{error.what}: {error.why}"}, what)


async def _limited(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """What the work returns. Raises ServerError where it does not end."""
    limit = asyncio.timeout(_CASE_LIMIT_S)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        why = f"it did not end within {_CASE_LIMIT_S:.0f} s"
        raise ServerError("the server hangs", why=why, next="it is started again") from error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _in_words(error: Exception) -> str:
    """The defect and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _server(station: Station) -> str:
    return f"{station.model} · {station.configuration.name}"


def _empty(station: Station, what: Case | Workload) -> dict[str, Any]:
    """A result without an answer yet."""
    workload, fault = (what.workload, what.fault) if isinstance(what, Case) else (what, "none")
    entry: dict[str, Any] = {
        "model": station.model,
        "configuration": station.configuration.name,
        "workload": workload.name,
        "fault": fault,
        "answer": "error",
        "marks": {},
        "why": "",
        "elapsed_s": 0.0,
    }
    if isinstance(what, Case):
        entry |= {"family": what.family, "cannot_fire": what.cannot_fire, "grade": "unknown"}
    return entry
