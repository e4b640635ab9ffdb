"""The facts of a session, in the order they happened; the only channel from a runner to its readers.

One line of `events.jsonl` holds one event, its number and its time (log.py).
An event is appended to the file first and seen second. Readers fold events into a `SessionState`
(state.py); an event of an unknown type is kept and skipped, so that a newer log still opens.
Payload fields are only added. Big columns never ride in an event: it names their file, relative to the
session folder.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = "klbench.session/1"


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_snake):
    """Base of all events."""


class RunnerStarted(Event, frozen=True, kw_only=True):
    """A runner took the session: first event, and again after each continuation."""

    klbench_version: str
    pid: int
    host: str
    target: dict[str, Any]
    """kind "demo" with model, "launch" with model_path and arguments, or "url" with url."""
    options: dict[str, Any]


class RunnerEnded(Event, frozen=True, kw_only=True):
    reason: str


class ServerPhase(Event, frozen=True, kw_only=True):
    """A launch moves on. phase: starting, importing, loading_weights, allocating, capturing_graphs,
    warming_up, ready, stopping, stopped, failed."""

    phase: str
    elapsed_s: float
    detail: str = ""


class ServerStarting(Event, frozen=True, kw_only=True):
    """The command that is run, as it can be copied and repeated, and where its log goes."""

    command: str
    log: str
    ready_to_capture: bool
    fault: str | None = None


class ServerReady(Event, frozen=True, kw_only=True):
    """What is really in force: `server` as in klbench.run/1; `differs` lists {"asked", "in_force"}."""

    server: dict[str, Any]
    url: str
    launch_s: float
    differs: list[dict[str, str]] = []
    notes: list[str] = []


class CodeSeen(Event, frozen=True, kw_only=True):
    """sglang was imported from a git checkout: its commit and what was changed in it, by file and hash."""

    root: str
    commit: str
    subject: str = ""
    changed: dict[str, str] = {}


class ServerEnded(Event, frozen=True, kw_only=True):
    """The server is gone: stopped by us (expected) or dead. last_lines: its own last words."""

    expected: bool
    exit_code: int | None
    why: str
    last_lines: list[str] = []


class JobStarted(Event, frozen=True, kw_only=True):
    """Long work began: kind launch, run, locate, report, relaunch. One job at a time."""

    job: int
    kind: str
    title: str


class JobProgress(Event, frozen=True, kw_only=True):
    job: int
    phase: str
    done: int
    total: int
    eta_s: float | None = None


class JobEnded(Event, frozen=True, kw_only=True):
    """outcome: done, cancelled, failed."""

    job: int
    outcome: str
    elapsed_s: float


class RunStarted(Event, frozen=True, kw_only=True):
    """run: its number in the session, from 1; prompts: {"source", "count", "sha256"}."""

    run: int
    helpers: list[str]
    prompts: dict[str, Any]
    options: dict[str, Any]
    prompts_file: str | None = None
    """JSON lines of token ids, relative to the session: what repeats these prompts exactly."""
    again_of: int | None = None
    """The run that this one measures again, on a server that klbench started again to look further into it:
    its other helpers stand as they are, and what was found of it still holds."""
    not_exercised: list[dict[str, Any]] = []
    """What this run will not put to the test: {"code", "text", "values", "advice"} of core/exercised.py."""


class RunContinued(Event, frozen=True, kw_only=True):
    """An interrupted run goes on: `helpers` are left to do, the first of them without the arms in `kept`."""

    run: int
    helpers: list[str]
    kept: list[str] = []
    not_exercised: list[dict[str, Any]] = []
    """As of `RunStarted`: the server may be another one."""


class ArmStarted(Event, frozen=True, kw_only=True):
    run: int
    helper: str
    arm: str
    requests: int
    tokens: int


class ArmProgress(Event, frozen=True, kw_only=True):
    """done and total in tokens that the server has worked off, from its log or its load counters."""

    run: int
    helper: str
    arm: str
    done: int
    total: int
    elapsed_s: float
    eta_s: float | None = None


class ArmEnded(Event, frozen=True, kw_only=True):
    run: int
    helper: str
    arm: str
    elapsed_s: float


class HelperEnded(Event, frozen=True, kw_only=True):
    """`result` is the helper's object of klbench.run/1; `columns` the npz file, relative to the session."""

    run: int
    helper: str
    result: dict[str, Any]
    columns: str | None
    elapsed_s: float


class TokenTexts(Event, frozen=True, kw_only=True):
    """Text of the tokens in a helper's columns: a JSON file {"<token id>": "text"}, after the measurement."""

    run: int
    helper: str
    file: str


class Asked(Event, frozen=True, kw_only=True):
    """The runner waits for `Confirm` (or `Cancel`) before it does `what` to a server that is not its own."""

    what: str
    why: str = ""


class Answered(Event, frozen=True, kw_only=True):
    """The question was answered."""

    yes: bool


class RunEnded(Event, frozen=True, kw_only=True):
    """`verdict` is the object of klbench.run/1; cancelled runs keep what they have."""

    run: int
    verdict: dict[str, Any]
    elapsed_s: float
    cancelled: bool = False


class Located(Event, frozen=True, kw_only=True):
    """`result` is the body of klbench.locate/1 (alignment, capture, findings, masked) plus what the origin
    screen shows: `around` (operator rows near the first origin) and `map` (layers x rows)."""

    locate: int
    helper: str
    request: int
    result: dict[str, Any]
    elapsed_s: float
    run: int | None = None
    """The run whose divergence was located."""


class Replayed(Event, frozen=True, kw_only=True):
    """A located operator was called again alone; `result` is an operator of klbench.census/1 with `arms_M`,
    the row counts of the two arms. `finding` counts from 0."""

    locate: int
    finding: int
    result: dict[str, Any]
    elapsed_s: float


class CensusTaken(Event, frozen=True, kw_only=True):
    """`result` is the body of klbench.census/1; census: its number in the session, from 1."""

    census: int
    result: dict[str, Any]
    elapsed_s: float


class ExperimentsPlanned(Event, frozen=True, kw_only=True):
    """`plan`: steps grouped by configuration, what is impossible and why, launches, estimate_s."""

    helper: str
    plan: dict[str, Any]


class ExperimentEnded(Event, frozen=True, kw_only=True):
    """`result`: name, outcome, text, values, meaning; experiment: its number in the session, from 1."""

    experiment: int
    helper: str
    name: str
    result: dict[str, Any]
    elapsed_s: float
    run: int | None = None
    """The run whose divergence it asks about."""


class RunJudged(Event, frozen=True, kw_only=True):
    """A run's verdict after what was located and tried since it ended."""

    run: int
    verdict: dict[str, Any]


class ReportWritten(Event, frozen=True, kw_only=True):
    files: list[str]


class ControlTaken(Event, frozen=True, kw_only=True):
    """A terminal controls the runner from here on; every other one watches."""

    client: str
    """What the terminal calls itself, so that it knows itself again; no secret."""
    terminal: str = ""
    pid: int = 0


class ControlLeft(Event, frozen=True, kw_only=True):
    """The terminal that had control is gone: a detach, or a dropped connection."""

    client: str


class Trouble(Event, frozen=True, kw_only=True):
    """What a user should see: the KlbenchError fields and a level: error, warning, note."""

    level: str
    what: str
    why: str = ""
    next: str = ""


class Call(Event, frozen=True, kw_only=True):
    """One HTTP call or process of the runner, as a line that can be copied and repeated (no secrets)."""

    line: str
    outcome: str
    elapsed_s: float


class Unknown(Event, frozen=True, kw_only=True):
    """Stands for an event of a type that this version does not know."""

    name: str = ""


class Damaged(Event, frozen=True, kw_only=True):
    """Stands for a line that cannot be read; `line` counts from 1. It is never written."""

    line: int
    why: str


EVENT_TYPES: tuple[type[Event], ...] = (
    RunnerStarted, RunnerEnded, ServerPhase, ServerStarting, ServerReady, ServerEnded,
    JobStarted, JobProgress, JobEnded, RunStarted, ArmStarted, ArmProgress, ArmEnded,
    HelperEnded, TokenTexts, RunEnded, Located, Replayed, CensusTaken, ReportWritten, Trouble, Call, Unknown,
    Asked, Answered, RunContinued, CodeSeen, ExperimentsPlanned, ExperimentEnded, RunJudged,
    ControlTaken, ControlLeft,
)  # fmt: skip
