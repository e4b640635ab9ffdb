"""What a headless command says on stderr while it works: plain lines, few of them.

session /home/a/.local/state/klbench/sessions/20261129-191730-demo-dense
server importing · 0:03
server ready · 0:21 · sglang 0.5.23 · cpu torch_native · deterministic
will not be exercised: one request decodes alone, ... · use more requests: --samples 32
match · generation arm · 32 requests
match · generation arm · 61 % · 0:05 left
match · clean · 4096 tokens · 0 differ · avg KL 0 · 0:08

With `--progress json` the same as objects, with the numbers of the event (session/events.py):

{"schema": "klbench.progress/1", "at": 1764444444.1, "type": "arm_progress", "seq": 31, "run": 1,
 "helper": "match", "arm": "generation", "done": 2498, "total": 4096, "elapsed_s": 8.1, "eta_s": 5.2,
 "text": "match · generation arm · 61 % · 0:05 left"}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from klbench.cli.failures import VOICE, note
from klbench.core.text import cache_hits, counted, elapsed, kl
from klbench.session import events as ev
from klbench.session.documents import missed_lines
from klbench.session.log import Entry

REPEAT_S = 10.0
"""Progress of the same piece of work is said this often at most: a log of an hour stays readable."""
_SHORT = (str, int, float, bool, type(None))


class Progress:
    """Says entries of the event log as lines; give it to a runner as `on_entry`."""

    repeat_s = REPEAT_S

    def __init__(
        self, say: Callable[[str], None] = note, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._said_at = clock()
        self._phase = ""
        self._job = ""
        self._missed: set[str] = set()

    def __call__(self, entry: Entry) -> None:
        for line in self.lines(entry.event):
            self._say(line)

    def lines(self, event: ev.Event) -> list[str]:
        """What is to be said of an event now."""
        lines = self._before_a_run(event)
        if (line := self._line(event)) is not None:
            lines.append(line)
        if lines:
            self._said_at = self._clock()
        return lines

    def _before_a_run(self, event: ev.Event) -> list[str]:
        """What the run will not put to the test; a run that is made again does not repeat it."""
        if not isinstance(event, ev.RunStarted | ev.RunContinued):
            return []
        new = [line for line in missed_lines(event.not_exercised) if line not in self._missed]
        self._missed.update(new)
        return [f"will not be exercised: {line}" for line in new]

    def _line(self, event: ev.Event) -> str | None:
        match event:
            case ev.ServerPhase():
                return self._server_phase(event)
            case ev.ServerReady():
                return ready_line(event.server, event.launch_s)
            case ev.ServerEnded(expected=False):
                return f"server ended · {event.why}"
            case ev.ArmStarted():
                return f"{event.helper} · {event.arm} arm · {counted(event.requests, 'request')}"
            case ev.ArmProgress():
                left = f" · {elapsed(event.eta_s)} left" if event.eta_s is not None else ""
                share = 100 * event.done // max(1, event.total)
                return self._seldom(f"{event.helper} · {event.arm} arm · {share} %{left}")
            case ev.HelperEnded():
                return helper_line(event.helper, event.result) + f" · {elapsed(event.elapsed_s)}"
            case ev.JobStarted():
                self._job = event.kind
                return event.title if event.kind in ("locate", "relaunch", "census", "experiment") else None
            # What a run and a launch do is said by the arms and by the server's phases, but not how long.
            case ev.JobProgress(done=0, eta_s=eta_s) if eta_s and self._job in ("run", "launch"):
                what = counted(event.total, "helper") if event.total else event.phase
                return f"{what} · about {elapsed(eta_s)} by earlier sessions"
            case ev.JobProgress() if self._job in ("locate", "census", "experiment"):
                phase = event.phase.replace("_", " ")
                if phase != self._phase:
                    self._phase = phase
                    return phase
                part = f" · {100 * event.done // event.total} %" if event.total else ""
                return self._seldom(f"{phase}{part}")
            # What failed is said at the end, or with its helper.
            case ev.Trouble(level="warning" | "note"):
                parts = (event.what, event.why, event.next)
                return f"{event.level}: " + " · ".join(part for part in parts if part)
            case _:
                return None

    def _server_phase(self, event: ev.ServerPhase) -> str | None:
        line = f"server {event.phase.replace('_', ' ')} · {elapsed(event.elapsed_s)}"
        if event.phase == self._phase:
            return self._seldom(line)
        self._phase = event.phase
        return line

    def _seldom(self, line: str) -> str | None:
        return line if self._clock() - self._said_at >= self.repeat_s else None


class JsonProgress(Progress):
    """Says them as JSON objects, with the event's own numbers and with the ends that words leave out."""

    repeat_s = 1.0

    def __call__(self, entry: Entry) -> None:
        event = entry.event
        for line in self.lines(event) or _ends(event):
            note(line, at=entry.at, type=str(event.__struct_config__.tag), seq=entry.seq, **numbers_of(event))


def progress() -> Progress:
    """As the command line asked for it."""
    return JsonProgress() if VOICE.as_json else Progress()


def _ends(event: ev.Event) -> list[str]:
    match event:
        case ev.ArmEnded():
            return [f"{event.helper} · {event.arm} arm · done in {elapsed(event.elapsed_s)}"]
        case ev.RunEnded():
            return [f"run {event.run} ended · {elapsed(event.elapsed_s)}"]
        case ev.JobEnded():
            return [f"job {event.job} · {event.outcome} · {elapsed(event.elapsed_s)}"]
        case _:
            return []


def numbers_of(event: ev.Event) -> dict[str, object]:
    """The event's fields that are numbers, words or nothing, and those of its mappings: not what is long."""
    found: dict[str, object] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, Mapping):
            found[name] = {key: part for key, part in value.items() if isinstance(part, _SHORT)}
        elif isinstance(value, _SHORT):
            found[name] = value
    return found


def ready_line(server: Mapping[str, Any], launch_s: float) -> str:
    """What the server is, in one line."""
    parts = [
        f"server ready · {elapsed(launch_s)}" if launch_s else "attached",
        f"sglang {server.get('sglang_version')}",
        f"{server.get('device')} {server.get('attention_backend')}",
        "deterministic" if server.get("deterministic") else "NOT deterministic",
        "radix cache on" if server.get("radix_cache") else "radix cache OFF",
        f"page {server.get('page_size')}",
    ]
    return " · ".join(parts)


def helper_line(name: str, result: Mapping[str, Any]) -> str:
    """A helper's result in one line."""
    parts = [f"{name} · {result.get('status')}"]
    if result.get("reason"):
        parts.append(str(result["reason"]))
    if result.get("hits") is not None:
        parts.append(cache_hits(name, result["hits"], int(result.get("requests") or 0)))
        parts.append(counted(result["tokens"], "token"))
        parts.append(f"{result.get('divergent_tokens')} differ")
        parts.append(f"avg KL {kl(result.get('avg_kl_div'))}")
    return " · ".join(parts)
