"""What a server's log says: how far its start is, and which error is the server's own when it fails.

Pure functions and one small fold over lines; they know the spellings of sglang 0.5.17 to 0.5.23.

    >>> phases = Phases()
    >>> phases.feed("[2026-11-29 19:19:14] Load weight begin. avail mem=17.23 GB")
    'loading_weights'
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = (
    "starting",
    "importing",
    "loading_weights",
    "allocating",
    "capturing_graphs",
    "warming_up",
    "ready",
)

# In the order of a start. Each pattern means that its phase has begun.
_BEGINS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loading_weights", re.compile(r"Load weight begin|Loading (safetensors|pt) checkpoint shards")),
    (
        "allocating",
        re.compile(r"Load weight end|KV Cache is allocated|Memory pool end|Mamba Cache is allocated"),
    ),
    (
        "capturing_graphs",
        re.compile(r"Capture .*\bbegin\b|Capturing (batches|num tokens)|Compiling num tokens"),
    ),
    ("warming_up", re.compile(r"Application startup complete|Uvicorn running on|Start of (pd )?warmup")),
    ("ready", re.compile(r"The server is fired up and ready to roll")),
)
_KV_DTYPE = re.compile(r"KV Cache is allocated\..*?dtype: (?:torch\.)?(\w+)")


class Phases:
    """The phase of a start, which only moves forward: draft models load their weights later, too."""

    def __init__(self) -> None:
        self._reached = 0

    @property
    def phase(self) -> str:
        return PHASES[self._reached]

    def feed(self, line: str) -> str | None:
        """The new phase if this line of the log begins one."""
        found = 1 if line.strip() else 0
        for phase, pattern in _BEGINS:
            if PHASES.index(phase) > found and pattern.search(line):
                found = PHASES.index(phase)
        if found <= self._reached:
            return None
        self._reached = found
        return self.phase

    def is_ready(self) -> None:
        """The server answered for itself: its log may be configured to say nothing."""
        self._reached = len(PHASES) - 1


def kv_cache_dtype(log: str) -> str | None:
    """The type in which the log says that the K/V cache was allocated."""
    found = _KV_DTYPE.search(log)
    return found.group(1) if found else None


@dataclass(frozen=True, slots=True)
class OwnError:
    """The server's own error: one sentence and the lines around it, as the log has them (untrusted text)."""

    headline: str
    lines: tuple[str, ...]


# How sglang's parent processes and its HTTP server report that somebody else has failed.
_WRAPPERS = re.compile(
    r"^(EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|SystemExit|KeyboardInterrupt)\b"
    r"|Initialization failed|scheduler died|Rank \d+ scheduler|child process|sigquit|leaked semaphore"
    r"|Server process|server process (failed|exited)|warmup"
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d[^\]]*\] ?")
_EXCEPTION_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: .*)?$")
_ARGPARSE = re.compile(r"^[\w. /-]{1,80}: error: .+")
_CHAIN = ("During handling of the above", "The above exception was the direct cause")
_KEEP_LINES = 60
# It ends the server without an exception, with stacks of all threads around it and a KILL behind it. A soft
# one says the same words and ends nothing.
_WATCHDOG = re.compile(r"\bwatchdog timeout \((?!.*soft=True)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Block:
    headline: str
    lines: tuple[str, ...]
    from_scheduler: bool


def _traceback_blocks(lines: Sequence[str]) -> list[_Block]:
    blocks: list[_Block] = []
    index = 0
    while index < len(lines):
        if not _TRACEBACK.search(lines[index]):
            index += 1
            continue
        first = index
        index += 1
        headline = ""
        while index < len(lines):
            line = lines[index]
            if line.startswith((" ", "\t")) or not line.strip():
                index += 1
                continue
            found = _EXCEPTION_LINE.match(line)
            if found and not _TRACEBACK.search(line):
                headline = line
                index += 1
                # A message of several lines goes on until the next log line or traceback.
                while index < len(lines) and _continues(lines[index]):
                    index += 1
                break
            break
        if not headline:
            continue
        # The later part of a chain says what finally failed; both are kept together.
        start = _PREFIX.sub("", lines[first])
        previous = blocks[-1] if blocks else None
        chained = previous is not None and any(
            mark in line for mark in _CHAIN for line in lines[first - 3 : first]
        )
        block_lines = tuple(lines[first:index])
        if chained and previous is not None:
            blocks[-1] = _Block(headline, previous.lines + block_lines, previous.from_scheduler)
        else:
            blocks.append(_Block(headline, block_lines, "cheduler hit an exception" in start))
    return blocks


def _continues(line: str) -> bool:
    return bool(line.strip()) and not _PREFIX.match(line) and not _TRACEBACK.search(line) and line[0] in " \t"


def own_error(log: str) -> OwnError | None:
    """The error that ended the server, told from the wrappers that report it once more.

    A scheduler's exception comes first, then its watchdog's word, the last traceback that is no wrapper, and
    what the argument parser refused; None when the log names no error.
    """
    lines = log.splitlines()
    blocks = _traceback_blocks(lines)
    own = [block for block in blocks if not _WRAPPERS.search(block.headline)]
    chosen = next((block for block in own if block.from_scheduler), None)
    if chosen is None:
        for line in lines:
            if _WATCHDOG.search(line):
                return OwnError(_PREFIX.sub("", line), (line,))
        chosen = own[-1] if own else None
    if chosen is not None:
        return OwnError(chosen.headline, chosen.lines[-_KEEP_LINES:])
    for number, line in reversed(list(enumerate(lines))):
        if _ARGPARSE.match(line):
            return OwnError(line, tuple(lines[max(0, number - 2) : number + 1]))
    for line in reversed(lines):
        text = _PREFIX.sub("", line)
        if "No module named" in text or "out of memory" in text.lower():
            return OwnError(text, (line,))
    return OwnError(blocks[-1].headline, blocks[-1].lines[-_KEEP_LINES:]) if blocks else None


def last_lines(log: str, count: int = 20) -> list[str]:
    """The last lines of the log that say something."""
    return [line for line in log.splitlines() if line.strip()][-count:]
