"""How much of a run a capture repeats where the server does not repeat itself."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from klbench.core.columns import HelperColumns
from klbench.engine.arms import NotRepeatedError
from klbench.engine.captured_work import Work, generation_tokens, of_its_own, reaching, repeats
from klbench.session.locating import ArmsAsProgress, repeated_so_far

PROMPT, OUTPUT = 10, 8


def work(first_divergence: int | None) -> Work:
    prefill = np.zeros(OUTPUT, dtype=np.float32)
    if first_divergence is not None:
        prefill[first_divergence:] = 1e-6
    one = np.array([0])
    columns = HelperColumns(
        helper="match",
        prompt_len=np.array([PROMPT]),
        cached_generation=one,
        cached_scoring=one,
        output_len=np.array([OUTPUT]),
        dropped=np.array([False]),
        start=np.array([0, OUTPUT]),
        token_id=np.zeros(OUTPUT, dtype=np.int32),
        decode_nats=np.zeros(OUTPUT, dtype=np.float32),
        prefill_nats=prefill,
        prompt_start=np.array([0, PROMPT]),
        prompt_ids=np.zeros(PROMPT, dtype=np.int32),
    )
    return Work("match", [[0] * PROMPT], 0, columns, OUTPUT)


@dataclasses.dataclass
class Watched:
    """The part of an outcome that decides whether it is enough."""

    work: Work
    repeats: bool
    symptom_shows: bool
    trace_dir: Path
    kept_dumps: Path | None = None


class Server:
    """Repeats its first `repeats` tokens, and of them diverges again only where it `shows`; of runs of their
    own the first to diverge is number `own`."""

    def __init__(self, repeats: int, *, shows: bool = True, own: int = 1, traces: Path) -> None:
        self.repeats = repeats
        self.shows = shows
        self.own = own
        self.traces = traces
        self.asked: list[int] = []

    async def watch(self, what: Work) -> Watched:
        self.asked.append(generation_tokens(what))
        repeated = self.asked[-1] <= self.repeats
        if what.must_repeat and not repeated:
            raise NotRepeatedError("request 0 did not repeat")
        trace_dir = self.traces / f"trace-{len(self.asked)}"
        trace_dir.mkdir(exist_ok=True)
        self.own -= not repeated
        return Watched(what, repeated, self.shows if repeated else self.own <= 0, trace_dir)


async def located(server: Server, first_divergence: int | None) -> Watched:
    short = work(first_divergence)
    whole = dataclasses.replace(short, whole_generation=True)
    return await repeated_so_far(server.watch, whole, short)  # type: ignore[arg-type,return-value]


async def test_a_server_that_repeats_itself_is_captured_whole(tmp_path: Path) -> None:
    server = Server(OUTPUT, traces=tmp_path)

    found = await located(server, 2)

    assert (server.asked, found.repeats, found.work.cut) == ([OUTPUT], True, None)


async def test_one_that_goes_astray_later_is_captured_up_to_the_first_divergence_and_says_so(
    tmp_path: Path,
) -> None:
    server = Server(5, traces=tmp_path)

    found = await located(server, 2)

    assert (server.asked, found.repeats) == ([OUTPUT, 3], True)
    assert "did not repeat all of its tokens" in (found.work.cut or "")
    # The run that went astray is not told.
    assert os.listdir(tmp_path) == ["trace-2"]


@pytest.mark.parametrize("first_divergence", [4, OUTPUT - 1, None])
async def test_of_one_that_does_not_repeat_the_first_divergence_what_came_instead_is_told(
    first_divergence: int | None, tmp_path: Path
) -> None:
    server = Server(2, traces=tmp_path)

    found = await located(server, first_divergence)

    short = [] if first_divergence in (OUTPUT - 1, None) else [first_divergence + 1]
    assert (server.asked, found.repeats) == ([OUTPUT, *short], False)
    assert os.listdir(tmp_path) == ["trace-1"]


@pytest.mark.parametrize(("own", "asked"), [(1, [OUTPUT, 3]), (2, [OUTPUT, 3, OUTPUT])])
async def test_of_one_that_does_not_diverge_where_it_repeats_a_run_of_its_own_that_does_is_told(
    own: int, asked: list[int], tmp_path: Path
) -> None:
    server = Server(5, shows=False, own=own, traces=tmp_path)

    found = await located(server, 2)

    assert (server.asked, found.repeats, found.symptom_shows) == (asked, False, True)
    # What shows nothing is not kept.
    assert os.listdir(tmp_path) == [found.trace_dir.name]


def test_rows_are_fetched_as_far_as_the_latest_origin_and_no_further() -> None:
    assert generation_tokens(reaching(work(2), PROMPT + 4)) == 6
    assert generation_tokens(reaching(work(2), PROMPT - 3)) == 3
    assert generation_tokens(reaching(work(2), PROMPT + 99)) == OUTPUT
    assert generation_tokens(reaching(work(None), PROMPT - 3)) == 1


def test_a_run_of_its_own_says_that_and_why_it_is_cut():
    measured = dataclasses.replace(work(2), cut="Only 3 of 8 generated tokens were captured.")
    came = work(5).measured
    own = of_its_own(measured, came)
    assert (own.measured, own.must_repeat, generation_tokens(own)) == (came, True, 6)
    assert "a run of its own" in (own.cut or "")
    assert (own.cut or "").endswith("Only 3 of 8 generated tokens were captured.")


def test_a_capture_repeats_what_has_the_same_prompts_and_tokens_as_far_as_it_goes() -> None:
    measured = work(2)
    columns = measured.measured
    shorter = dataclasses.replace(
        columns, token_id=columns.token_id[:3], start=np.array([0, 3]), output_len=np.array([3])
    )
    assert repeats(measured, columns)
    assert repeats(measured, shorter)
    for place in (0, 2):
        other = shorter.token_id.copy()
        other[place] += 1
        assert not repeats(measured, dataclasses.replace(shorter, token_id=other))
    prompt = columns.prompt_ids.copy()
    prompt[0] += 1
    assert not repeats(measured, dataclasses.replace(columns, prompt_ids=prompt))
    assert not repeats(measured, dataclasses.replace(columns, dropped=np.array([True])))


def test_the_arms_of_a_capture_move_the_jobs_progress():
    said = []

    class Job:
        def progress(self, phase, done, total, eta_s=None):
            said.append((phase, done, total, eta_s))

    arms = ArmsAsProgress(Job())
    arms.arm_started("generation", 4, 900)
    arms.arm_progress("generation", 300, 900, 1.0, 2.0)
    phase = "repeating the generation arm with 4 requests"
    assert said == [(phase, 0, 900, None), (phase, 300, 900, 2.0)]
