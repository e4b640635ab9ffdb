"""What a list of sessions shows of each: one line, from its log and its lock.

Invariant: nothing heavy is imported (numpy, asyncio, httpx), so that `klbench sessions` answers at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from klbench.core.verdict_words import conditions_in_words
from klbench.errors import KlbenchError
from klbench.session.folder import SessionFolder, all_sessions
from klbench.session.interruption import interrupted
from klbench.session.reading import find_runner, read_state
from klbench.session.request import Target
from klbench.session.size import size_bytes
from klbench.session.state import SessionState


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One line of `klbench sessions`; labels are untrusted text."""

    folder: SessionFolder
    created_at: float
    label: str
    status: str
    """running, running elsewhere, interrupted (it can be continued), or ended."""
    doing: str
    """The job in progress or the server's phase; empty when nobody works on it."""
    found: str
    """helper statuses and the origin, e.g. "match clean · prefill_cache_hit diverged"."""
    size_bytes: int
    brief: str = ""
    """The same in few words: `1 clean, 2 diverged · self_attn.attn of layer 1 (probable)`."""
    server: str = ""
    """The server's state: ready at its address, failed with the reason, stopped."""
    verdict: str = ""
    """The latest verdict in a word or two."""
    traces_bytes: int = 0
    """The part of the size that `sessions prune` frees."""
    interrupted: bool = False


def summarise(folder: SessionFolder) -> SessionSummary:
    """What a list shows of a session. Raises UsageError for one of an unknown version."""
    content = folder.read_session_file()
    state = read_state(folder)
    lock = find_runner(folder)
    status = "ended" if lock is None else "running" if lock.local else f"running elsewhere ({lock.where})"
    if lock is None and interrupted(state) is not None:
        status = "interrupted"
    doing = ""
    if lock is not None:
        doing = state.job.title if state.job is not None else f"server {state.server.phase}"
    return SessionSummary(
        folder=folder,
        created_at=content.created_at,
        label=" ".join(filter(None, (_label(content.target), _fault(content.options)))),
        status=status,
        doing=doing,
        found=found_in_words(state),
        brief=_found_in_few_words(state),
        size_bytes=size_bytes(folder.path),
        server=_server_in_words(state),
        verdict=_verdict_in_words(state),
        traces_bytes=size_bytes(folder.traces),
        interrupted=lock is None and interrupted(state) is not None,
    )


def survey(
    folders: Sequence[SessionFolder] | None = None,
) -> tuple[list[SessionSummary], list[tuple[SessionFolder, str]]]:
    """The sessions under the root, the newest first, and those that cannot be opened, with the reason.

    Raises UsageError where the root itself cannot be read.
    """
    summaries, refused = [], []
    for folder in all_sessions() if folders is None else folders:
        try:
            summaries.append(summarise(folder))
        except KlbenchError as error:
            refused.append((folder, " · ".join(part for part in (error.what, error.why) if part)))
    return summaries, refused


def list_sessions(folders: Sequence[SessionFolder] | None = None) -> list[SessionSummary]:
    """The sessions that can be opened, the newest first."""
    return survey(folders)[0]


def _server_in_words(state: SessionState) -> str:
    server = state.server
    if server.ended is not None and not server.ended.expected:
        return f"died: {server.ended.why}"[:60]
    return f"ready at {server.url}" if server.ready else server.phase


def _verdict_in_words(state: SessionState) -> str:
    verdict = state.run.verdict if state.run is not None else None
    if not verdict:
        return ""
    return conditions_in_words(verdict) or str(verdict.get("status", ""))


def found_in_words(state: SessionState) -> str:
    """What the latest run and locate job found, in one line."""
    words = []
    if state.run is not None:
        words = [f"{helper.helper} {helper.status}" for helper in state.run.helpers]
    if state.located_now is not None:
        for finding in state.located_now.result.get("findings", [])[:1]:
            words.append(f"origin {finding.get('module')} ({finding.get('grade')})")
    return " · ".join(words)


def _found_in_few_words(state: SessionState) -> str:
    if state.run is None:
        return ""
    times = Counter(helper.status for helper in state.run.helpers)
    words = [", ".join(f"{count} {status.replace('_', ' ')}" for status, count in times.items())]
    found = state.located_now.result.get("findings") if state.located_now is not None else None
    if isinstance(found, list) and found and isinstance(found[0], dict):
        words.append(f"{_in_layer(str(found[0].get('module')))} ({found[0].get('grade')})")
    return " · ".join(words)


def _in_layer(module: str) -> str:
    """`self_attn.attn of layer 1` for `model.layers.1.self_attn.attn`; any other path as it is."""
    parts = re.fullmatch(r"(?:\w+\.)*layers\.(\d+)\.([\w.]+)", module)
    return f"{parts[2]} of layer {parts[1]}" if parts is not None else module


def _fault(options: Mapping[str, object]) -> str:
    """The planted fault's name, without how it was set."""
    fault = options.get("fault")
    return fault.partition(":")[0] if isinstance(fault, str) else ""


def _label(target: dict[str, object]) -> str:
    try:
        return msgspec.convert(target, Target).label
    except msgspec.ValidationError:
        return str(target.get("kind", "?"))
