"""The screens that analyse a run: what they show at four sizes, and what their keys do."""

import re

import investigated
import pytest
import recorded
from msgspec.structs import replace
from pilots import press, screen_text, scripted_runner, settle, until, workbench
from ways import SIZES, at

from klbench.session import commands as cmd
from klbench.session.reading import read_state
from klbench.tui import guide_words, verdict_words
from klbench.tui.screens.experiments import ExperimentsScreen
from klbench.tui.screens.guide import GuideScreen


@pytest.fixture
def session(tmp_path):
    return investigated.investigated(tmp_path / "20251129-dense")


@pytest.mark.parametrize("size", [*SIZES, (160, 45)], ids=at)
@pytest.mark.parametrize(
    ("name", "key"),
    [("verdict", "v"), ("distribution", "d"), ("positions", "b"), ("residues", "m"), ("experiments", "X"),
     ("guide", "W"), ("origin", "O"), ("census", "M")],
)  # fmt: skip
async def test_every_screen_of_results_reads_without_colour(name, key, size, session, snapshot):
    async with workbench(session, size=size) as (_app, pilot):
        text = await press(pilot, key)
        assert all(len(line) <= size[0] for line in text.splitlines())
        assert "\x1b" not in text
        snapshot(f"found-{name}-{at(size)}", text)


@pytest.mark.parametrize("key", ["v", "W", "M"])
async def test_sentences_in_a_table_end_with_a_whole_word(key, session):
    async with workbench(session, size=(96, 24)) as (_app, pilot):
        text = await press(pilot, key)
        assert " …" in text
        assert not re.search(r"\S…", text)


async def test_from_each_screen_of_results_all_others_are_one_key_away(session):
    async with workbench(session) as (app, pilot):
        for key, place in (("d", "distribution"), ("b", "positions"), ("m", "residues"), ("X", "experiments"),
                           ("v", "verdict"), ("d", "distribution")):  # fmt: skip
            await press(pilot, key)
            assert app.screen.place == place
        await press(pilot, "escape")
        assert app.screen.place == "main"


async def test_the_next_helper_is_one_key_away(session):
    async with workbench(session) as (_app, pilot):
        assert "prefill_cache_hit" in (await press(pilot, "d")).splitlines()[0]
        assert "decode_cache_hit" in (await press(pilot, "h")).splitlines()[0]
        text = await press(pilot, "h")
        assert "match · 0 of 96 requests differ" in text.splitlines()[0]
        assert "3072  100.00%" in text


# Verdict


async def test_the_cursor_chooses_the_explanation_and_n_makes_what_decides_it(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        text = await press(pilot, "v")
        assert "what decides it" in text
        assert "+ " in text
        await _ready(app)
        await press(pilot, "n")
        experiments = [command for command in told if isinstance(command, cmd.Experiment)]
        assert [command.names for command in experiments] == [["wide_restore"]]
        assert isinstance(app.screen, ExperimentsScreen)


async def test_a_verdict_that_is_undecided_says_what_to_run(tmp_path):
    from klbench.core.diagnosis import diagnose

    folder = tmp_path / "20251129-dense"
    recorder = recorded.start(folder)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    results = {"match": {"status": "not_run", "reason": "the radix cache is off", "tokens": 0}}
    recorder.add(recorded.ev.RunEnded(run=1, verdict=diagnose(results, {}, {}), elapsed_s=1.0))
    async with workbench(folder) as (_app, pilot):
        text = await press(pilot, "v")
    assert "UNDECIDED" in text
    assert "match has no answer: the radix cache is off" in text


def test_before_a_verdict_the_summary_says_when_it_comes_or_how_to_get_one(measuring):
    run = read_state(recorded.folder_of(measuring)).run
    assert verdict_words.summary_lines(run) == [" RUN 1 · no verdict yet: it comes with the end of the run"]
    assert "Run the helpers: r on the main screen" in verdict_words.summary_lines(None)[0]
    ended = replace(run, elapsed_s=3.0, cancelled=True)
    assert verdict_words.summary_lines(ended) == verdict_words.summary_lines(None)


# Experiments


async def _ready(app) -> None:
    """As if the recorded server were up: what a live session would show."""

    app.model.live = True
    app.model.state = replace(
        app.model.state, server=replace(app.model.state.server, phase="ready"), job=None
    )


async def test_the_matrix_says_of_each_experiment_how_it_stands(session):
    async with workbench(session, size=(160, 45)) as (_app, pilot):
        text = await press(pilot, "X")
    rows = [line.strip("│▌ ") for line in text.splitlines() if line.startswith("│")]
    lines = {row.split()[0]: row for row in reversed(rows) if row}
    assert "same bits" in lines["repeats"]
    assert "not possible" in lines["graphs"]
    assert "as predicted" in lines["pad"]
    assert "not made" in lines["overlap"]
    assert "not possible" in lines["kv_dtype"]


async def test_enter_makes_what_the_verdict_proposes_and_a_plan_is_made_of_what_is_marked(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        await press(pilot, "X")
        await _ready(app)
        await press(pilot, "enter")
        await press(pilot, "g", "down", "space", "down", "down", "down", "down", "space")
        assert app.screen.marked == {"alone", "page_size"}
        text = screen_text(app)
        assert "Plan: 2 marked · 3 runs of prefill_cache_hit · 2 relaunches" in text
        await press(pilot, "P")
    made = [c.names for c in told if isinstance(c, cmd.Experiment)]
    assert made == [["wide_restore"], ["alone", "page_size"]]


async def test_what_is_not_possible_here_says_why_and_is_not_sent(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        await press(pilot, "X")
        await _ready(app)
        table = app.screen.query_one("#matrix-table")
        table.move_to(7)
        text = await press(pilot, "enter")
        assert "a CPU server replays no CUDA graphs" in text
        await press(pilot, "space")
        assert not app.screen.marked
    assert not [c for c in told if isinstance(c, cmd.Experiment)]


async def test_relaunches_of_more_than_a_minute_say_that_they_will_be_asked_about(session):

    from klbench.tui.experiment_words import plan_line

    async with workbench(session) as (app, _pilot):
        state = app.model.state
        slow = replace(state, server=replace(state.server, launch_s=45.0))
        assert "asks first" not in plan_line(slow, {"overlap"})
        assert "asks first" in plan_line(slow, {"page_size"})
        # Two experiments in one configuration start it once.
        assert "2 relaunches" in plan_line(slow, {"overlap", "chunk_size"})


async def test_p_pads_to_the_residue_under_the_cursor(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        text = await press(pilot, "m")
        assert "◀" in text
        await _ready(app)
        await press(pilot, "p")
        assert app.screen.place == "experiments"
    names = [c.names for c in told if isinstance(c, cmd.Experiment)]
    assert names == [["pad:prompt_len%8=4"]]


@pytest.mark.parametrize(
    "verdict", [{}, {"hypotheses": [3, {}], "next": "x", "evidence": 7, "conditions": "y"}]
)
async def test_a_session_from_elsewhere_breaks_no_screen(tmp_path, verdict):
    folder = tmp_path / "20251129-dense"
    recorder = recorded.start(folder)
    hostile = {**recorded.FACTS, "page_size": "sixteen", "tp_size": [2], "architectures": 9, "gpus": 3}
    recorder.add(recorded.ev.ServerReady(server=hostile, url="", launch_s=1.0))
    recorded.begin_run(recorder)
    recorded.run_helper(recorder, 1, "match", dirty=False)
    recorder.add(recorded.ev.RunEnded(run=1, verdict=verdict, elapsed_s=1.0))
    made = {"outcome": ["x"], "text": 4, "values": "z"}
    ended = {"run": 1, "helper": "match", "name": "repeats", "result": made, "elapsed_s": 1.0}
    recorder.add(recorded.ev.ExperimentEnded(experiment=1, **ended))
    recorder.add(
        recorded.ev.CensusTaken(census=1, result={"operators": [3, {}], "tried_M": "x"}, elapsed_s=1.0)
    )
    result = {"findings": [{"evidence": "x", "positions": 3}], "around": [{}], "map": 3, "capture": []}
    recorder.add(
        recorded.ev.Located(locate=1, run=1, helper="match", request=0, result=result, elapsed_s=1.0)
    )
    async with workbench(folder) as (app, pilot):
        for key in "vdbmXMOW":
            await press(pilot, key)
            assert not app.crash
        await press(pilot, "escape", "O", "n", "f", "E")
        assert not app.crash


# Origin


async def test_n_goes_through_the_findings_and_the_m_table_is_the_latest_replay(session):
    async with workbench(session, size=(160, 45)) as (_app, pilot):
        first = await press(pilot, "O")
        assert "state_restore" in first
        assert "finding 1 of 2" in first
        second = await press(pilot, "n")
        assert "finding 2 of 2" in second
        assert "down_proj" in second
        assert "M      1  2  3  4  8  16  32  64  127" in second
        assert "M: other bits from 64 rows on, by at most 22 ulps; the arms had 16 and 4096" in second


async def test_where_a_capture_has_one_finding_the_next_one_is_not_offered(finished):
    async with workbench(finished, size=(160, 45)) as (_app, pilot):
        text = await press(pilot, "O")
        assert "n next finding" not in text.splitlines()[-1]
        assert "! this capture found no other origin" in await press(pilot, "n")


async def test_replay_asks_the_runner_for_the_shown_finding_and_says_why_not_without_one(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        await press(pilot, "O")
        await _ready(app)
        await press(pilot, "n", "r")
        assert [c for c in told if isinstance(c, cmd.Replay)] == [cmd.Replay(locate=1, finding=1)]
    async with workbench(session) as (_app, pilot):
        text = await press(pilot, "O", "n", "r")
        assert "read-only" in text


async def test_a_finding_that_cannot_be_replayed_says_so_on_the_origin_screen_and_is_not_sent(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        await press(pilot, "O")
        await _ready(app)
        app.show_all()
        await settle(pilot)
        assert "r replay" not in screen_text(app).splitlines()[-1]
        assert "! a state_restore cannot be replayed: only an operator" in await press(pilot, "r")
        assert "cannot be replayed" in await press(pilot, "question_mark", *"replay")
        await press(pilot, "escape")
        assert "r replay" in (await press(pilot, "n")).splitlines()[-1]
        await press(pilot, "r")
    assert [c for c in told if isinstance(c, cmd.Replay)] == [cmd.Replay(locate=1, finding=1)]


@pytest.mark.parametrize("kind", ["replay", "locate", "census", "experiment", "report"])
async def test_a_refused_command_is_told_where_it_was_asked_and_leaves_the_verdict(kind, session):
    async with workbench(session) as (app, pilot):
        before = screen_text(app)
        await press(pilot, "O")
        recorder = recorded.Recorder(session, at=recorded.BEGAN_AT + 500, seq=500)
        recorder.add(recorded.ev.JobStarted(job=9, kind=kind, title="it"))
        recorder.add(recorded.ev.Trouble(level="error", what="it cannot be", why="so it is", next="look"))
        recorder.add(recorded.ev.JobEnded(job=9, outcome="failed", elapsed_s=0.1))
        await until(pilot, lambda: app.model.state.last_job.number == 9)
        said = screen_text(app)
        assert "✗ it cannot be" in said
        assert "so it is" in said
        assert sentences(await press(pilot, "escape")) == sentences(before)


def sentences(text: str) -> list[str]:
    """What the main screen says: all lines from the ▸ on."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith(" ▸")) :]


async def test_numbers_and_export_say_what_is_missing(session):
    async with workbench(session, size=(120, 40)) as (_app, pilot):
        assert "does not say where its trace is" in await press(pilot, "O", "f")
        assert "does not say where its trace is" in await press(pilot, "E")


async def test_a_census_is_taken_and_shown_by_one_key_each(session):
    async with scripted_runner(session) as told, workbench(session, readonly=False) as (app, pilot):
        text = await press(pilot, "M")
        assert "layers.1.self_attn.o_proj" in text
        assert "64    22" in text
        await _ready(app)
        await press(pilot, "r")
    assert [c for c in told if isinstance(c, cmd.Census)] == [cmd.Census()]


# Guide


async def test_the_guide_shows_the_step_its_reason_what_was_learned_and_the_key(session):
    async with workbench(session) as (app, pilot):
        text = screen_text(app)
        assert "guide 4/7 ▸ settle condition 2" in text
        assert "learned" in text
        assert "U starts the server, then X" in text
        hidden = await press(pilot, "w")
        assert "guide 4/7" not in hidden
        assert "guide 4/7" in await press(pilot, "w")


@pytest.mark.parametrize("tall", [False, True])
async def test_the_guide_above_the_keys_ends_no_sentence_in_its_middle(session, tall):
    async with workbench(session) as (app, _pilot):
        states = app.model.guide_states()
    lines = guide_words.compact(states, 80, tall=tall)
    text = " ".join(" ".join(lines).split())
    assert len(lines) <= (5 if tall else 4)
    assert all(len(line) <= 80 for line in lines)
    assert guide_words.learned(states) in text
    assert "…" not in text
    assert "· U starts the server, then X" in text


async def test_a_step_is_passed_over_and_taken_up_again(session):
    async with workbench(session) as (app, pilot):
        await press(pilot, "W", "space")
        assert app.model.skipped == {"condition_2"}
        assert "» settle" in screen_text(app) or "»" in screen_text(app)
        text = await press(pilot, "escape")
        assert "guide 6/7 ▸ confirm it" in text or "guide 5/7" in text
        await press(pilot, "W")
        app.screen.query_one("#steps-table").move_to(3)
        await press(pilot, "space")
        assert app.model.skipped == set()


async def test_enter_on_a_step_presses_its_key(session):
    async with workbench(session) as (app, pilot):
        await press(pilot, "W")
        assert isinstance(app.screen, GuideScreen)
        await press(pilot, "enter")
        await settle(pilot)
        assert app.screen.place == "experiments"


async def test_every_screen_has_the_guide_on_one_line(session):
    async with workbench(session) as (_app, pilot):
        for key in "vdbmXO":
            assert "guide 4/7 ▸" in await press(pilot, key)
            await press(pilot, "escape")


def test_evidence_that_several_requests_give_in_the_same_words_is_one_line():
    fact = {"text": "the state was read with other bits"}
    hypothesis = {
        "text": "a wrong restore",
        "for": [fact, fact, {"text": "hits alone differ"}],
        "against": [],
    }
    marks = [(mark.strip(), text) for mark, text in verdict_words.why_paragraphs(hypothesis, "n")]
    assert marks[1:4] == [
        ("+", "the state was read with other bits (2 times)"),
        ("+", "hits alone differ"),
        ("-", "nothing speaks against it"),
    ]
