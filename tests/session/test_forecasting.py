"""What a capture will write is said before it begins; where it is much, nothing is written without leave."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.cli.progress import Progress
from klbench.engine import capture as capturing
from klbench.engine.capture import capture
from klbench.engine.forecast import Forecast
from klbench.errors import ExitCode, UndecidedError, UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session import locating
from klbench.session.folder import make_session
from klbench.session.forecasting import ASK_FROM_BYTES, CaptureForecasts, is_much
from klbench.session.locating import Chosen, trace_and_locate
from klbench.session.log import Entry, read_log
from klbench.session.request import Options, StartRequest, Target
from klbench.session.runner import JobCancelled, Runner
from tests.session.fake_engine import FakeBench
from tests.session.test_locating import work

GB = 10**9
SMALL, LARGE = Forecast(34, 400, 3, 41 * 10**6), Forecast(34, 400, 3, 20 * GB)
FREE = 1000 * GB


pytestmark = pytest.mark.usefixtures("places")


class Captures(FakeBench):
    """A session's work that captures as a locate job does, up to the first word to the server."""

    expected = SMALL
    times = 1
    arms_s: float | None = 4.2

    async def locate(self, job, _helper, _request, _relaunch) -> None:
        place = self._session.folder.traces
        forecasts = CaptureForecasts(self._session, job, place, self.arms_s)
        for _ in range(self.times):
            await forecasts(self.expected, FREE)
            place.mkdir(exist_ok=True)
            (place / "written").write_text("x")


@dataclasses.dataclass
class Located:
    events: list[ev.Event]
    said: list[str]
    error: BaseException | None
    wrote: bool

    @property
    def notes(self) -> list[ev.Trouble]:
        return [event for event in self.events if isinstance(event, ev.Trouble) and event.level == "note"]

    @property
    def asked(self) -> list[ev.Asked]:
        return [event for event in self.events if isinstance(event, ev.Asked)]


def located(tmp_path: Path, make_work: Any, answer: str = "", **options: Any) -> Located:
    """A locate job; `answer` is what a user says to its question, without one there is no user."""
    target = Target(kind="demo", model="dense")
    start = StartRequest(target=target, options=Options(**options))
    folder = make_session(tmp_path / "session", *start.as_shown())
    said: list[str] = []
    show = Progress(said.append)

    async def work() -> BaseException | None:
        def seen(entry: Entry) -> None:
            show(entry)
            if isinstance(entry.event, ev.Asked):
                asyncio.get_running_loop().call_soon(say)

        def say() -> None:
            if answer == "agree":
                runner._current[0].agreed.set()
            else:
                runner.cancel()

        runner = Runner(folder, start, make_work, attended=bool(answer), on_entry=seen)
        async with runner:
            try:
                await runner.execute(cmd.Locate())
            except (UsageError, JobCancelled) as error:
                return error
            return None

    error = asyncio.run(work())
    events = [entry.event for entry in read_log(folder.events)]
    return Located(events, said, error, (folder.traces / "written").exists())


def much(times: int = 1) -> type[Captures]:
    return type("Much", (Captures,), {"expected": LARGE, "times": times})


def test_what_will_be_written_is_said_in_the_log_and_on_the_command_line(tmp_path):
    found = located(tmp_path, Captures)
    assert (found.error, found.wrote, found.asked) == (None, True, [])
    (note,) = found.notes
    assert note.what == "the capture writes about 41.0 MB in 34 forwards"
    assert note.why.startswith(f"1.0 TB are free in {tmp_path}/session/traces, its arms took 0:04 when they")
    assert [line for line in found.said if "41.0 MB in 34 forwards" in line and "1.0 TB are free" in line]


@pytest.mark.parametrize("arms_s", [None, 0.0, 0.4])
def test_arms_that_took_no_time_or_an_unknown_one_are_not_spoken_of(tmp_path, arms_s):
    (note,) = located(tmp_path, type("Quick", (Captures,), {"arms_s": arms_s})).notes
    assert note.why == f"1.0 TB are free in {tmp_path}/session/traces"


def test_captures_that_are_alike_say_it_once(tmp_path):
    assert len(located(tmp_path, type("Twice", (Captures,), {"times": 3})).notes) == 1


def test_much_is_captured_once_a_user_agrees_and_is_not_asked_for_again(tmp_path):
    found = located(tmp_path, much(times=3), "agree")
    assert (found.error, found.wrote) == (None, True)
    (asked,) = found.asked
    assert asked.what == "capture about 20.0 GB in 34 forwards"
    assert "1.0 TB are free" in asked.why
    assert "--trace-dir DIR" in asked.why


def test_what_a_user_does_not_agree_to_is_not_written_and_says_what_to_do(tmp_path):
    found = located(tmp_path, much(), "cancel")
    assert isinstance(found.error, JobCancelled)
    assert not found.wrote
    refused = found.notes[-1]
    assert (refused.what, refused.why) == ("nothing was captured", "its size was not agreed to")
    assert "--trace-dir DIR names a larger disk" in refused.next


def test_without_a_user_much_is_refused_with_the_option_that_agrees(tmp_path):
    found = located(tmp_path, much())
    assert isinstance(found.error, UsageError)
    assert found.error.exit_code == ExitCode.USAGE
    assert (found.error.next, found.wrote) == ("agree with --yes-capture", False)
    assert "--trace-dir DIR" in found.error.why


def test_the_option_agrees(tmp_path):
    found = located(tmp_path, much(), yes_capture=True)
    assert (found.error, found.wrote, found.asked) == (None, True, [])
    assert "about 20.0 GB" in found.notes[0].what


def test_much_is_10_gib_or_a_quarter_of_what_is_free():
    assert not is_much(ASK_FROM_BYTES, 1 << 50)
    assert is_much(ASK_FROM_BYTES + 1, 1 << 50)
    assert not is_much(10, 40)
    assert is_much(10, 39)


# Where a capture stands still for it.


@pytest.fixture
def side(monkeypatch):
    """A server's side of which nothing may be asked before the answer."""
    monkeypatch.setattr(capturing, "forecast_for", lambda *_: LARGE)
    monkeypatch.setattr(capturing, "free_bytes", lambda _: FREE)
    return SimpleNamespace(model_config={})


async def test_a_capture_asks_before_it_makes_a_folder_or_says_a_word_to_the_server(side, tmp_path):
    heard = []

    async def refuse(expected: Forecast, free: int) -> None:
        heard.append((expected, free))
        raise UsageError("no")

    traces = tmp_path / "traces"
    with pytest.raises(UsageError, match="no"):
        await capture(side, work(2), trace_dir=traces, beforehand=refuse)
    assert heard == [(LARGE, FREE)]
    assert not traces.exists()


async def test_what_does_not_fit_is_refused_unasked(side, tmp_path, monkeypatch):
    monkeypatch.setattr(capturing, "free_bytes", lambda _: 21 * GB)
    traces = tmp_path / "traces"
    with pytest.raises(UndecidedError, match=r"about 20\.0 GB") as refused:
        await capture(side, work(2), trace_dir=traces, beforehand=lambda *_: pytest.fail("it was asked"))
    assert "21.0 GB are free there and 2.1 GB must stay free" in refused.value.why
    assert not traces.exists()


@pytest.mark.parametrize("backend", ["digest", "dumper", "state"])
async def test_every_capture_of_a_locate_job_says_beforehand_what_it_writes(
    side, tmp_path, monkeypatch, backend
):
    class Job:
        async def ask(self, what: str, why: str, *, agree_with: str) -> None:
            raise UsageError(what, why=why, next=agree_with)

        def progress(self, *_: Any) -> None: ...

    monkeypatch.setattr(locating, "as_whole_as_affordable", lambda _side, work, _backend: work)
    monkeypatch.setattr("klbench.engine.state_probing.as_whole_as_affordable", lambda _side, work, _: work)
    folder = make_session(tmp_path / "session", {"kind": "demo", "model": "dense"}, {})
    helper = SimpleNamespace(elapsed_s=4.2)
    run = SimpleNamespace(number=1, helper=lambda _: helper)
    emitted = []
    session = SimpleNamespace(
        start=StartRequest(target=Target(kind="demo", model="dense")),
        folder=folder,
        state=SimpleNamespace(runs=(run,), located=()),
        emit=emitted.append,
    )
    asked = work(2)
    chosen = Chosen(1, "match", 0)
    with pytest.raises(UsageError, match=r"capture about 20\.0 GB in 34 forwards"):
        await trace_and_locate(session, Job(), side, backend, chosen, asked.measured, 1, asked.prompts)
    assert [event.what for event in emitted] == ["the capture writes about 20.0 GB in 34 forwards"]
    assert not folder.traces.exists()
