"""A server is called stuck where its work would have been seen, and nowhere else; time is a number here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.engine import progress
from klbench.engine.arms import _Silent
from klbench.engine.client import Load
from klbench.engine.progress import Look, Seen, from_load, from_log, shows_batches, watch_arm
from klbench.errors import DeadlineError

pytestmark = pytest.mark.faults

MINUTE_S = 60.0
PREFILL = "[x] Prefill batch, #new-seq: 2, #new-token: 100, #cached-token: 0, token usage: 0.0\n"
DECODE = "[x] Decode batch, #running-req: 2, #token: 140\n"


class Over(Exception):
    """The arm's requests were answered, or its user looked away."""


class Heard(_Silent):
    """Notes what the observer is told, and after how many minutes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.said: list[tuple[str, int, Any]] = []

    def arm_stalled(self, _arm: str, silent_s: float) -> None:
        self.said.append(("stalled", self.clock.minutes, round(silent_s / MINUTE_S)))

    def arm_unseen(self, _arm: str, why: str) -> None:
        self.said.append(("unseen", self.clock.minutes, why))

    def all(self, what: str) -> list[tuple[str, int, Any]]:
        return [one for one in self.said if one[0] == what]


class Clock:
    """A minute passes at each look; `happens` is told the minute first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.until = 1000.0, 0
        self.happens: Callable[[int], object] = lambda _minute: None
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(progress, "asyncio", SimpleNamespace(sleep=self._sleep))

    @property
    def minutes(self) -> int:
        return round((self.now_s - 1000.0) / MINUTE_S)

    async def _sleep(self, _s: float) -> None:
        self.now_s += MINUTE_S
        if self.minutes > self.until:
            raise Over
        self.happens(self.minutes)

    async def watch(
        self, look: Look, minutes: int, happens: Callable[[int], object] = lambda _minute: None
    ) -> Heard:
        """What is said in an arm of so many minutes."""
        self.until, self.happens = minutes, happens
        heard = Heard(self)
        try:
            await watch_arm("generation", 1_000_000, look, heard)
        except Over:
            return heard
        raise AssertionError("nothing ends it")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def server_that_says(*loads: Load | None) -> Any:
    """A client whose server answers /v1/loads with these, the last one again and again."""
    left = list(loads)

    async def load() -> Load | None:
        return left.pop(0) if len(left) > 1 else left[0]

    return SimpleNamespace(load=load, answer_bytes=0)


def looking_at(client: Any, **more: Any) -> Look:
    return from_load(client, lambda _load: None, **more)


async def test_without_an_answer_about_its_load_no_server_is_given_up(clock: Clock) -> None:
    heard = await clock.watch(looking_at(server_that_says(None)), 600)
    ((_, minute, why),) = heard.said
    assert minute == 4
    assert "/v1/loads gives no answer: it is missing there, or refused" in why


async def test_gauges_that_stand_still_are_no_proof_that_a_server_does(clock: Clock) -> None:
    full = Load(running=8, queued=24, used_tokens=65536)
    filling = [Load(8, 24, tokens) for tokens in range(1000, 65536, 5000)]
    heard = await clock.watch(looking_at(server_that_says(*filling, full)), 600)
    ((what, _, why),) = heard.said
    assert what == "unseen"
    assert "can stand still while it works" in why


async def test_a_full_pool_with_forwards_that_are_counted_is_progress(clock: Clock) -> None:
    loads = [Load(8, 24, 65536, computed_rows=rows) for rows in range(1, 10_000)]
    heard = await clock.watch(looking_at(server_that_says(*loads)), 600)
    assert heard.said == []


async def test_requests_that_come_and_go_are_a_sign_of_work(clock: Clock) -> None:
    loads = [Load(8, 300 - done // 20, 65536) for done in range(600)]
    heard = await clock.watch(looking_at(server_that_says(*loads)), 590)
    assert [what for what, *_ in heard.said] == ["unseen"]


async def test_a_server_that_counted_forwards_and_stops_is_given_up(clock: Clock) -> None:
    loads = [Load(8, 24, 100, computed_rows=rows) for rows in (1, 9, 70)]
    with pytest.raises(DeadlineError, match="no progress in the generation arm for 31 minutes"):
        await clock.watch(looking_at(server_that_says(*loads)), 600)
    assert clock.minutes == 3 + 31


async def test_a_server_that_never_begins_is_given_up_where_it_counts_its_forwards(clock: Clock) -> None:
    with pytest.raises(DeadlineError):
        await clock.watch(looking_at(server_that_says(Load(0, 8, 0, computed_rows=5))), 600)


async def test_bytes_of_the_answer_are_progress(clock: Clock) -> None:
    client = server_that_says(Load(0, 0, 0, computed_rows=5))

    def comes(_minute: int) -> None:
        client.answer_bytes += 1000

    assert (await clock.watch(looking_at(client), 600, comes)).said == []


async def test_a_load_that_is_not_told_for_a_while_is_no_silence_of_the_server(clock: Clock) -> None:
    loads = [Load(8, 0, 100, computed_rows=1), *[None] * 40, Load(8, 0, 100, computed_rows=1)]
    heard = await clock.watch(looking_at(server_that_says(*loads)), 41 + 20)
    assert len(heard.all("unseen")) == 1
    assert all(silent < 30 for _, _, silent in heard.all("stalled"))


async def test_a_log_without_batch_lines_is_no_silence_of_the_server(clock: Clock, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("loading weights\n")
    heard = await clock.watch(from_log(log, 40, shows_prefill=shows_batches(log)), 600)
    ((what, minute, why),) = heard.said
    assert (what, minute) == ("unseen", 4)
    assert "--log-level" in why


async def test_a_long_interval_between_decode_lines_is_no_silence_of_the_server(
    clock: Clock, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(PREFILL)

    def begins(minute: int) -> None:
        if minute == 2:
            with log.open("a") as file:
                file.write(PREFILL)

    heard = await clock.watch(from_log(log, 1_000_000, shows_prefill=shows_batches(log)), 600, begins)
    assert [what for what, *_ in heard.said] == ["unseen"]


async def test_forwards_in_the_plugins_log_are_progress_without_any_line(
    clock: Clock, tmp_path: Path
) -> None:
    forwards = tmp_path / "forwards-0.jsonl"
    forwards.write_text("an earlier arm\n")

    def forward(_minute: int) -> None:
        with forwards.open("a") as file:
            file.write("{}\n")

    look = from_log(tmp_path / "server.log", 40, forwards=forwards)
    assert (await clock.watch(look, 600, forward)).said == []
    look = looking_at(server_that_says(None), forwards=forwards)
    assert (await clock.watch(look, 600, forward)).said == []


async def test_a_server_whose_forwards_stop_is_given_up(clock: Clock, tmp_path: Path) -> None:
    forwards = tmp_path / "forwards-0.jsonl"

    def stops(minute: int) -> None:
        if minute <= 5:
            forwards.write_text("{}\n" * minute)

    for look in (
        from_log(tmp_path / "server.log", 40, forwards=forwards),
        looking_at(server_that_says(None), forwards=forwards),
    ):
        forwards.write_text("")
        clock.now_s = 1000.0
        with pytest.raises(DeadlineError):
            await clock.watch(look, 600, stops)
        assert clock.minutes == 5 + 31


async def test_a_server_whose_log_shows_batches_and_then_none_is_given_up(
    clock: Clock, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text("ready\n" + PREFILL)
    with pytest.raises(DeadlineError):
        await clock.watch(from_log(log, 40, shows_prefill=shows_batches(log)), 600)

    def works(minute: int) -> None:
        if minute <= 3:
            with log.open("a") as file:
                file.write(PREFILL + DECODE)

    clock.now_s = 1000.0
    with pytest.raises(DeadlineError):
        await clock.watch(from_log(log, 40), 600, works)
    assert clock.minutes == 3 + 31


async def test_a_source_that_is_slow_by_nature_gets_its_time(clock: Clock) -> None:
    async def look() -> Seen:
        return Seen(tokens=clock.minutes // 25)

    heard = await clock.watch(look, 600)
    assert heard.all("stalled")[0][1:] == (4, 4), "nothing is known of it yet"
    assert all(minute < 25 for _, minute, _ in heard.all("stalled"))
    clock.now_s = 1000.0

    async def stops() -> Seen:
        return Seen(tokens=min(clock.minutes // 25, 3))

    with pytest.raises(DeadlineError):
        await clock.watch(stops, 600)
    assert clock.minutes == 75 + 3 * 25 + 1
