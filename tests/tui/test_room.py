"""What a window has room for: whole columns beside each other, and one pane alone when it is zoomed."""

import json

import pytest
from pilots import press, screen_text, workbench

from klbench.core.guide import GuideFacts, where_we_are
from klbench.core.residue_table import ResidueLine
from klbench.core.text import cell_width
from klbench.session.folder import SessionFolder
from klbench.session.state import RunState
from klbench.session.survey import summarise
from klbench.tui import guide_words, verdict_words
from klbench.tui.ascii import plain
from klbench.tui.screens.residues import sentences
from klbench.tui.tables import called, operator_rows


@pytest.mark.parametrize("width", [140, 159, 160, 250])
async def test_requests_and_tokens_stand_beside_each_other_with_all_that_they_need(width, finished):
    async with workbench(finished, size=(width, 45)) as (_app, pilot):
        text = await press(pilot)
        assert ("╭─ guide ─" in text) is (width >= 160)
        lines = text.splitlines()
        first = next(place for place, line in enumerate(lines) if "[2] requests" in line)
        last = next(place for place, line in enumerate(lines) if "32 diverged" in line)
        assert "first" in lines[first + 1]
        assert not [line for line in lines[first:last] if "›" in line], "a column is cut"


@pytest.mark.parametrize(("key", "title"), [("1", "[1] helpers"), ("2", "[2] requests"), ("3", "[3] tokens")])
async def test_a_zoomed_pane_has_the_window_alone_however_wide_it_is(key, title, finished):
    async with workbench(finished, size=(160, 45)) as (app, pilot):
        before = screen_text(app)
        text = await press(pilot, key, "z")
        assert [line.partition(" · ")[0] for line in text.splitlines() if line.startswith("╭─")] == [
            next(line for line in text.splitlines() if title in line).partition(" · ")[0]
        ]
        assert text.count("╭─") == 1
        await press(pilot, "z", "2")
        assert screen_text(app).count("╭─") == before.count("╭─") == 5


def test_the_operators_around_an_origin_say_their_layer_where_it_is_another_one():
    around = [
        {"module": "model.layers.0.mlp.down_proj", "output": "equal"},
        {"module": "model.layers.1.self_attn.o_proj", "output": "differs", "origin": True},
        {"module": "model.layers.1.mlp.act_fn", "output": "differs"},
        {"module": "model.layers.12.input_layernorm", "output": "differs"},
        {"module": "lm_head", "output": "differs"},
    ]
    shown = [operator_rows(around).columns[0].show(row) for row in range(len(around))]
    assert shown == [
        "  layers.0.mlp.down_proj",
        "◉ self_attn.o_proj",
        "  mlp.act_fn",
        "  layers.12.input_layernorm",
        "  lm_head",
    ]


def test_without_a_clean_request_the_residues_say_so():
    line = ResidueLine("prompt_len", 8, None, 0, divergent_there=8, divergent=32, clean_there=0, clean=0)
    assert sentences([line])[0].startswith("Every request differs, so there is no clean one")


def test_a_step_whose_words_need_no_explanation_has_no_empty_heading():
    for item in where_we_are(GuideFacts()):
        paragraphs = guide_words.explanation(item)
        assert paragraphs[-1] != ("", "WORDS")
    assert any(("", "WORDS") in guide_words.explanation(item) for item in where_we_are(GuideFacts()))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("curl -s -X POST 'http://127.0.0.1:38057/flush_cache?timeout=30'", "flush_cache"),
        ("curl -s -X POST -d @/calls/6e2a.json 'http://127.0.0.1:38057/generate'", "generate"),
        ("curl -s 'https://[::1]:30000/v1/models'", "v1/models"),
        ("/usr/bin/python3 -m sglang.launch_server --port 1", "sglang.launch_server"),
        ("/usr/bin/nvidia-smi --query", "nvidia-smi"),
        ("nvidia-smi", "nvidia-smi"),
    ],
)
def test_a_command_is_named_by_what_it_calls(line, name):
    assert called(line) == name


async def test_what_all_three_charts_say_alike_is_said_once(finished):
    async with workbench(finished, size=(120, 40)) as (_app, pilot):
        await press(pilot, "1", "up", "up", "2")
        assert (await press(pilot, "b")).count("No token differs.") == 1


def test_a_list_of_sessions_says_the_fault_and_in_few_words_what_was_found(finished):
    file = finished / "session.json"
    content = json.loads(file.read_text())
    content["options"]["fault"] = "restore-key:layer=1"
    file.write_text(json.dumps(content))
    known = summarise(SessionFolder(finished))
    assert known.label == "demo-dense restore-key"
    assert known.brief == "1 clean, 2 diverged · self_attn.attn of layer 1 (probable)"


def test_the_palettes_magnifier_has_a_sign_of_its_width_in_ascii():
    shown = plain("🔎 Search")
    assert "?" not in shown
    assert cell_width(shown) == cell_width("🔎 Search")


def test_a_clean_verdict_is_no_divergence_and_not_none():
    clean = {"status": "none", "grade": "probable"}
    run = RunState(number=1, started_at=0.0, prompts={}, options={}, helpers=(), verdict=clean)
    assert verdict_words.summary_lines(run)[0] == " RUN 1 · NO DIVERGENCE · grade probable"
