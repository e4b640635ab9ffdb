"""What can be done now, and why something cannot: the judgments behind the registry of actions.

Pure functions of a `Situation`; a reason is what the user gets to read, so it names the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Answer = Literal[True] | str
"""True, or why it cannot be done now."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What actions are judged by; made anew from the session's state and the screen at each question."""

    session: bool = False
    """A session is open; `name` names it to klbench's other commands."""
    name: str = "SESSION"
    live: bool = False
    """A runner answers, so commands can be sent."""
    readonly: bool = False
    watching: bool = False
    """Another terminal has control, or had it; `controlled`: one has it now."""
    controlled: bool = False
    server: str = ""
    """Phase of the server, "ready" when it can work."""
    job: str = ""
    """Kind of the job in progress."""
    measured: bool = False
    """There is a helper's result to look at."""
    loading: bool = False
    """The requests are being read, so that there will be one under the cursor in a moment."""
    request: int | None = None
    """The request under the cursor."""
    request_diverged: bool = False
    located: bool = False
    """The request under the cursor has a located origin."""
    any_located: bool = False
    findings: int = 0
    """How many findings the origin on the screen has."""
    not_replayable: str = ""
    """Why the finding on the screen cannot be replayed; empty where it can be, or where there is none."""
    verdict: bool = False
    """The run has a verdict, or goes on and says by now what it will not exercise."""
    texts: bool = False
    """There is a log, a command or a report to open in another program."""
    asks: bool = False
    """The runner waits for an agreement."""
    interrupted: bool = False
    """The latest run has something left to do."""
    readable_only: bool = False
    """A bundle, or a session of another host: no runner can be started here."""
    attached: bool = False
    """The server is somebody else's, which klbench only attached to."""
    paused: bool = False
    """Updates are held back."""
    touring: bool = False
    """The guided tour is under way."""
    before: bool = False
    """There is an earlier session to compare this one with."""


def _key(action: str) -> str:
    """The key of an action; the registry reads this module first."""
    from klbench.tui.actions import key_of

    return key_of(action)


def refused(situation: Situation) -> str | None:
    """Why no command can go out from here, None where one can."""
    if situation.readonly:
        return "this session is open read-only"
    if situation.watching and situation.live:
        if situation.controlled:
            return f"another terminal controls this session: press {_key('control')} to take control over"
        return f"this terminal only watches: press {_key('control')} to take control"
    return None


def can_control(situation: Situation) -> Answer:
    if situation.readonly or not situation.live:
        return "no runner can be commanded from here"
    return True if situation.watching else "this terminal has control"


def can_ready(situation: Situation) -> Answer:
    """A job can start: a runner answers, its server works, nothing else runs."""
    if (why := refused(situation)) is not None:
        return why
    if not situation.live:
        if situation.readable_only:
            return f"no runner works here: in a shell, klbench run --like {situation.name}"
        return f"no runner is attached: {_key('start_server')} on the main screen starts the server again"
    if situation.job:
        return f"a {situation.job} is running: wait for it, or press {_key('cancel')} to cancel it"
    if situation.server != "ready":
        return f"the server is not ready ({situation.server or 'not started'})"
    return True


LOADING = "the requests are being read"
"""Why something cannot be done in this moment; it can in the next."""


def can_locate(situation: Situation) -> Answer:
    if situation.request is None:
        return LOADING if situation.loading else "no request is chosen: run the helpers first"
    if not situation.request_diverged:
        return f"request {situation.request} does not differ: nothing to locate"
    return True if situation.located else can_ready(situation)


def can_analyse(situation: Situation) -> Answer:
    return True if situation.measured else "nothing was measured yet: run the helpers first"


def can_origin(situation: Situation) -> Answer:
    return True if situation.any_located else "nothing was located yet"


def can_replay(situation: Situation) -> Answer:
    """A replay needs the live server; what was replayed with the capture is shown without it."""
    if not situation.any_located:
        return "nothing was located yet"
    if not situation.findings:
        return "no origin is shown here that could be replayed"
    return situation.not_replayable or can_ready(situation)


def can_report(situation: Situation) -> Answer:
    if not situation.measured:
        return "nothing was measured yet"
    if situation.readonly or not situation.live:
        return f"nobody works on this session: in a shell, klbench report {situation.name}"
    if (why := refused(situation)) is not None:
        return why
    return f"a {situation.job} is running" if situation.job else True


def can_tokens(situation: Situation) -> Answer:
    if situation.request is None:
        return LOADING if situation.loading else "no request is chosen: run the helpers first"
    return True


def can_cancel(situation: Situation) -> Answer:
    if not situation.job:
        return "nothing is running"
    if (why := refused(situation)) is not None:
        return why
    return True if situation.live else "no runner is attached"


def can_session(situation: Situation) -> Answer:
    return True if situation.session else "no session is open yet"


def can_open_in(situation: Situation) -> Answer:
    if not situation.session:
        return "no session is open yet"
    return True if situation.texts else "there is nothing to open yet: no log, no command, no report"


def can_pause(situation: Situation) -> Answer:
    if situation.paused:
        return True
    if not situation.session:
        return "no session is open yet"
    return True if situation.live else "nothing goes on here that could be held back"


def can_confirm(situation: Situation) -> Answer:
    if not situation.asks:
        return "nothing waits for an agreement"
    return refused(situation) or True


def can_continue(situation: Situation) -> Answer:
    if not situation.session:
        return "no session is open yet"
    if situation.readable_only:
        return "what is open here can only be read"
    if not situation.live:
        # What never came to a helper's end is begun anew.
        if situation.interrupted or not situation.measured:
            return True
        return f"nothing was interrupted: press {_key('like')} to do the same once more in a new session"
    if not situation.interrupted:
        return f"nothing was interrupted: press {_key('run')} to run the helpers again"
    return can_ready(situation)


def can_start_server(situation: Situation) -> Answer:
    """The session's server can be started again, with nothing measured anew."""
    if not situation.session:
        return "no session is open yet"
    if situation.readable_only:
        return "what is open here can only be read"
    if not situation.live:
        return True
    if (why := refused(situation)) is not None:
        return why
    if situation.job:
        return f"a {situation.job} is running"
    if situation.attached:
        return "this server is not ours to start again: klbench is attached to it"
    return f"the server runs: {_key('run')} runs the helpers" if situation.server == "ready" else True


def can_next_finding(situation: Situation) -> Answer:
    if not situation.findings:
        return "no origin is shown here yet"
    return True if situation.findings > 1 else "this capture found no other origin"


def can_before_after(situation: Situation) -> Answer:
    return True if situation.before else f"this session repeats no other one: {_key('like')} does that"


def can_like(situation: Situation) -> Answer:
    if not situation.measured:
        return "nothing was measured yet that could be repeated"
    if situation.readable_only:
        return f"what is open here can only be read: in a shell, klbench run --like {situation.name}"
    if situation.live and (why := refused(situation)) is not None:
        return why
    return f"a {situation.job} is running" if situation.live and situation.job else True
