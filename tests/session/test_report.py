"""Reports say what was found and what was not, and untrusted text stays text."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.session import events as ev
from klbench.session.folder import make_session
from klbench.session.log import Entry
from klbench.session.report import gather, not_checked, write_report
from klbench.session.report_content import blocks
from klbench.session.report_markdown import code, text
from klbench.session.report_markdown import markdown as write_markdown
from klbench.session.state import fold
from tests.session.scripted import DIVERGED, FINDING, RESULT, SERVER, VERDICT

HOSTILE = "</td>|`[x](javascript:alert(1))`\n# title\x1b[31m ![i](http://e) <script>\u202e @user ```"


def markdown(report):
    return write_markdown(blocks(report))


def state_of(*events):
    return fold(Entry(number, 100.0 + number, event) for number, event in enumerate(events, start=1))


def measured(**result):
    return state_of(
        ev.RunnerStarted(
            klbench_version="0.1.0",
            pid=1,
            host="h",
            target={"kind": "demo", "model": "dense"},
            options={"prompt_tokens": 300},
        ),
        ev.ServerStarting(
            command="python -m sglang.launch_server", log="l", ready_to_capture=True, fault="restore-key"
        ),
        ev.ServerReady(server={**SERVER, "page_size": 16}, url="u", launch_s=20.0),
        ev.RunStarted(
            run=1,
            helpers=["match", "prefill_cache_hit"],
            prompts={"source": "seeded", "count": 4, "sha256": "ab12"},
            options={},
        ),
        ev.HelperEnded(run=1, helper="match", result={**DIVERGED, **result}, columns=None, elapsed_s=1.0),
        ev.HelperEnded(
            run=1,
            helper="prefill_cache_hit",
            result={**RESULT, "status": "not_run", "reason": "0 hits"},
            columns=None,
            elapsed_s=1.0,
        ),
        ev.RunEnded(
            run=1,
            verdict={
                **VERDICT,
                "status": "found",
                "evidence": [{"code": "c", "text": "only hits differ", "values": {}}],
            },
            elapsed_s=2.0,
        ),
        ev.Located(
            locate=1,
            helper="match",
            request=2,
            elapsed_s=3.0,
            result={
                "alignment": {"proved": True, "rows": 268, "reason": None},
                "capture": {"backend": "dumper", "bytes": 3_000_000, "changed_logprobs": False},
                "findings": [{**FINDING, "kinds": ["state_restore", "operator"]}],
                "masked": [{"module": "model.norm"}],
                "around": [
                    {"module": "model.layers.1.self_attn.o_proj", "inputs": "equal", "output": "differs"}
                ],
            },
        ),
    )


def test_a_report_names_the_helpers_the_origin_and_the_commands():
    shown = markdown(gather(Path("/s"), measured()))
    assert "match" in shown
    assert "`model.layers.1.self_attn.o_proj`" in shown
    assert "ab12" in shown
    assert "klbench run --demo dense" in shown
    assert "klbench locate --helper match --request 2 --demo dense" in shown
    assert "python -m sglang.launch_server" in shown
    assert "restore-key" in shown


def test_divergent_requests_come_with_the_residues_of_the_servers_own_sizes():
    report = gather(Path("/s"), measured())
    (request,) = report.runs[0].helpers[0].divergent
    assert (request.first_offset, request.first_position) == (0, 268)
    assert request.residues["prompt mod page 16"] == 268 % 16
    assert request.residues["cached mod 8"] == 267 % 8


def test_what_was_not_checked_is_said():
    notes = " ".join(not_checked(measured()))
    assert "decode_cache_hit was not asked for" in notes
    assert "prefill_cache_hit is not_run: 0 hits" in notes
    assert "4 prompts are fewer than the 32" in notes
    assert "state_restore and operator" in notes
    assert "probable, not confirmed" in notes
    assert not_checked(state_of()) == ["No helper was run."]


@pytest.mark.parametrize(("kind", "said"), [("url", True), ("demo", False), ("launch", False)])
def test_what_cannot_be_seen_of_others_is_said_of_an_attached_server(kind, said):
    runner = ev.RunnerStarted(klbench_version="0.1.0", pid=1, host="h", target={"kind": kind}, options={})
    notes = not_checked(state_of(runner, ev.RunStarted(run=1, helpers=["match"], prompts={}, options={})))
    assert any("Others may use" in note for note in notes) == said


def test_experiments_and_the_census_are_reported_with_what_they_mean():
    tried = {
        "name": "repeats",
        "outcome": "same_bits",
        "text": "5 repeats agree",
        "meaning": "no race showed",
    }
    operators = [
        {
            "module": "model.layers.1.self_attn.o_proj",
            "status": "not_invariant",
            "first_M": 64,
            "ulp_max": 22,
        },
        {"module": "model.norm", "status": "invariant", "first_M": None, "ulp_max": None},
    ]
    taken = {"rows": 127, "summary": {"invariant": 1, "not_invariant": 1}, "operators": operators}
    more = [
        ev.ExperimentEnded(experiment=1, helper="match", name="repeats", result=tried, elapsed_s=4.0, run=1),
        ev.CensusTaken(census=1, result=taken, elapsed_s=9.0),
    ]
    shown = markdown(
        gather(Path("/s"), fold((Entry(90 + n, 1.0, e) for n, e in enumerate(more)), measured()))
    )
    assert "| `repeats` | `match` | `same_bits` | 5 repeats agree | no race showed |" in shown
    assert "| `model.layers.1.self_attn.o_proj` | `64` | `22` |" in shown
    assert "`model.norm`" not in shown.partition("Operators by number of rows")[2]


def test_an_unlocated_divergence_is_said():
    run = measured()
    state = msgspec.structs.replace(fold([], run), located=())
    assert any("was not located" in note for note in not_checked(state))


def test_one_file_of_each_format_is_written_and_none_twice(tmp_path):
    folder = make_session(tmp_path / "session", {}, {})
    first = write_report(folder, measured())
    second = write_report(folder, measured())
    assert len({*first, *second}) == 6
    assert [file.suffix for file in first] == [".md", ".html", ".json"]
    data = json.loads(first[2].read_bytes())
    assert data["schema"] == "klbench.report/1"
    assert data["runs"][0]["helpers"][0]["divergent"][0]["first_position"] == 268
    assert first[0].read_text().startswith("# klbench report\n")


def hostile(value):
    """The same report with every text from outside replaced by a hostile one."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, dict):
        return {name: hostile(part) for name, part in value.items()}
    if isinstance(value, list):
        return [hostile(part) for part in value]
    return value


def test_a_hostile_session_renders_as_text():
    report = gather(Path("/s"), measured())
    replaced = msgspec.convert(hostile(msgspec.to_builtins(report)), type(report))
    shown = markdown(replaced)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    for line in outside_of_code(shown):
        assert "<" not in line.replace("\\<", "")
        assert not re.search(r"(?<!\\)\[[^]]*\]\(", line)
        assert not re.search(r"(?<!\\)!\[", line)


def outside_of_code(shown):
    """The lines without their code spans and without fenced blocks, as CommonMark finds them."""
    fence = None
    for line in shown.split("\n"):
        opened = re.match(r"(`{3,})", line)
        if fence is None and opened and line == f"{opened.group(1)}text":
            fence = opened.group(1)
        elif fence is not None:
            if line.strip("`") == "" and len(line) >= len(fence):
                fence = None
        else:
            yield re.sub(r"(?<![\\`])(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", line)
    assert fence is None


@given(st.text())
def test_a_code_span_holds_the_whole_text_and_stays_in_its_cell(value):
    shown = code(value)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)\|", shown)
    if shown != "–":
        fence = re.match(r"`+", shown).group()
        inner = shown[len(fence) : -len(fence)]
        assert fence not in re.findall(r"`+", inner)


@given(st.one_of(st.text(), st.text("_*`[]<>|~&$\\a1 ")))
def test_a_sentence_has_no_live_punctuation(value):
    # An underscore between letters or digits is never emphasis.
    shown = re.sub(r"(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])", "", text(value).replace("\\\\", ""))
    assert not re.search(r"(?<!\\)[`*_\[\]<>|~&$]", shown)


@pytest.mark.parametrize("start", ["- ", "+ ", "# ", "=== ", "1. ", "12) "])
def test_a_sentence_that_begins_like_a_list_or_a_heading_is_none(start):
    assert re.match(r"\d*\\", text(start + "x"))


@pytest.mark.parametrize("status", ["clean", "diverged", "not_run"])
def test_a_helper_without_numbers_never_shows_zeros(status):
    result = {**RESULT, "status": status, "avg_kl_div": None, "divergent_tokens": None}
    shown = markdown(gather(Path("/s"), measured(**result)))
    row = next(line for line in shown.split("\n") if line.startswith("| match |"))
    assert "| – |" in row


def test_what_the_run_never_reached_and_what_stayed_open_is_not_checked():
    state = measured()
    verdict = {
        **VERDICT,
        "evidence": [
            {"code": "window_not_crossed", "text": "no request is longer than the window", "values": {}},
            {"code": "cold", "text": "match: all are cold", "values": {"helper": "match"}},
            {"code": "cold", "text": "prefill: all are cold", "values": {"helper": "prefill_cache_hit"}},
            {"code": "restored", "text": "decode: 4 restored", "values": {}},
            "strange",
        ],
        "next": [{"code": "equal_m", "text": "compare at equal row counts", "values": {}}, None],
    }
    state = fold([Entry(90, 190.0, ev.RunJudged(run=1, verdict=verdict))], state)
    for number, outcome in enumerate(("not_possible", "moved"), start=1):
        made = {"outcome": outcome, "text": f"tried {number}", "meaning": ""}
        event = ev.ExperimentEnded(
            experiment=number, helper="match", name="graphs", result=made, elapsed_s=1.0
        )
        state = fold([Entry(90 + number, 190.0, event)], state)
    notes = not_checked(state)
    assert "No request is longer than the window." in notes
    assert "Prefill: all are cold." in notes
    assert "Not tried: compare at equal row counts." in notes
    assert "The experiment graphs on match answered nothing: tried 1." in notes
    told = "\n".join(notes)
    assert "Match: all are cold" not in told
    assert "decode: 4 restored" not in told
    assert "tried 2" not in told
    assert all(note in markdown(gather(Path("/s"), state)) for note in notes[:1])


def test_every_step_has_a_command_that_repeats_it():
    state = measured()
    made = [
        ev.ExperimentEnded(experiment=number, helper="match", name=name, result={}, elapsed_s=1.0)
        for number, name in enumerate(("alone", "repeats"), start=1)
    ]
    taken = ev.CensusTaken(census=1, result={}, elapsed_s=1.0)
    state = fold([Entry(90 + number, 1.0, event) for number, event in enumerate([*made, taken])], state)
    steps = dict(gather(Path("/a b"), state).repeat)
    assert steps["measure the helpers"].startswith("klbench run ")
    assert steps["locate the origin"].startswith("klbench locate --helper match --request 2 ")
    assert steps["make the experiments on match"].startswith(
        "klbench experiment --helper match alone repeats "
    )
    assert steps["take the census of operators"].startswith("klbench census ")
    assert steps["read this session"] == "klbench open '/a b'"
    for line in steps.values():
        assert line.startswith("klbench ") or "sglang.launch_server" in line
