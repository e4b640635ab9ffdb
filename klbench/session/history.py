"""How long work takes, from what earlier sessions on this machine took for the same target.

An estimate needs a session of the same model on this host; without one there is none. Of each kind of work
the median of the latest few counts, so that one slow day does not.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klbench.errors import UsageError
from klbench.session import events as ev
from klbench.session.folder import SessionFolder, all_sessions
from klbench.session.log import Entry, read_log
from klbench.session.process_identity import this_host

MOST_SESSIONS = 12
MOST_LOG_BYTES = 8 * 1024**2
_KEPT = 5


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier work took: launches in seconds, arms in seconds per token, the newest first."""

    launches_s: Sequence[float] = ()
    seconds_per_token: Mapping[tuple[str, str], Sequence[float]] = field(default_factory=dict)

    @property
    def launch_s(self) -> float | None:
        return statistics.median(self.launches_s[:_KEPT]) if self.launches_s else None

    def run_s(
        self, helpers: Collection[str], prompt_tokens: int, requests: int, new_tokens: int
    ) -> float | None:
        """What these helpers should take, None where an arm of one was never measured."""
        total = 0.0
        for helper in helpers:
            for arm, tokens in arm_tokens(helper, prompt_tokens, requests, new_tokens).items():
                known = self.seconds_per_token.get((helper, arm))
                if not known:
                    return None
                total += tokens * statistics.median(known[:_KEPT])
        return total


def arm_tokens(helper: str, prompt_tokens: int, requests: int, new_tokens: int) -> dict[str, int]:
    """The tokens that each arm of the helper works off."""
    once = prompt_tokens + requests * new_tokens
    if helper == "prefill_cache_hit":
        return {"warming": prompt_tokens, "generation": once, "scoring": once}
    if helper == "decode_cache_hit":
        twice = once + requests * (new_tokens + 1)
        return {"warming": once, "generation": twice, "scoring": twice}
    return {"generation": once, "scoring": once}


def past_of(target: Mapping[str, Any], folders: Sequence[SessionFolder] | None = None) -> Past:
    """What the latest sessions with this target took on this host. Reads files; not for an event loop."""
    launches: list[float] = []
    rates: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    if folders is None:
        try:
            folders = all_sessions()
        except UsageError:
            return Past()
    for folder in folders[:MOST_SESSIONS]:
        with contextlib.suppress(OSError):
            if os.stat(folder.events).st_size <= MOST_LOG_BYTES:
                _read(read_log(folder.events), target, launches, rates)
    return Past(tuple(launches), {key: tuple(values) for key, values in rates.items()})


def _read(
    entries: Sequence[Entry],
    target: Mapping[str, Any],
    launches: list[float],
    rates: defaultdict[tuple[str, str], list[float]],
) -> None:
    """Adds what one session took, its newest work first."""
    same = False
    begun: dict[tuple[str, str], int] = {}
    found: list[tuple[tuple[str, str], float]] = []
    launched: list[float] = []
    for entry in entries:
        match entry.event:
            case ev.RunnerStarted(host=host, target=theirs):
                same = host == this_host() and _key(theirs) == _key(target)
            case ev.ServerReady(launch_s=launch_s) if same and launch_s > 0:
                launched.append(launch_s)
            case ev.ArmStarted(helper=helper, arm=arm, tokens=tokens) if same:
                begun[helper, arm] = tokens
            case ev.ArmEnded(helper=helper, arm=arm, elapsed_s=elapsed_s) if same:
                tokens = begun.pop((helper, arm), 0)
                if tokens > 0:
                    found.append(((helper, arm), elapsed_s / tokens))
            case _:
                pass
    launches += launched[::-1]
    for key, rate in found[::-1]:
        rates[key].append(rate)


def _key(target: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("kind", "model", "model_path", "url", "arguments")
    return tuple(
        tuple(value) if isinstance(value := target.get(name) or "", list | tuple) else value for name in names
    )
