"""Every format says the same, stays text whatever is in it, and is as it was agreed (golden files).

KLBENCH_UPDATE_GOLDEN=1 writes the golden files anew.
"""

import html.parser
import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from klbench.session.plots import helper_plots, histogram_svg, map_svg, position_svg
from klbench.session.redaction import Redactor
from klbench.session.report import gather, render
from klbench.session.report_content import blocks
from klbench.session.report_github import MAX_BYTES, Appendix, github, shortest_command
from klbench.session.report_html import html as write_html
from tests.core.made_columns import make_columns
from tests.session.test_report import HOSTILE, hostile, measured, outside_of_code

GOLDEN = Path(__file__).parent / "golden"
MAP = {
    "layers": ["0", "1", "head"],
    "positions": [266, 267, 268],
    "arms": ["scoring"] * 3,
    "cells": [[0, 0, 0], [0, 0, 3], [0, -1, 2]],
}
COLUMNS = make_columns(
    prompt_len=[4, 6],
    decode=[[-1.0, -2.0, -3.0], [-1.0, float("nan"), -3.0]],
    prefill=[[-1.0, -2.25, -3.0], [-1.0, -2.0, -3.0001]],
)


def a_report():
    report = gather(Path("/s/20261129-demo"), measured())
    origin = replace(report.located[0], result={**report.located[0].result, "map": MAP})
    helper = replace(report.runs[0].helpers[0], plots=helper_plots(COLUMNS))
    run = replace(report.runs[0], helpers=[helper, *report.runs[0].helpers[1:]])
    return replace(
        report, written_at="2026-11-29T20:00:00Z", klbench_version="0.1.0", runs=[run], located=[origin]
    )


@pytest.mark.parametrize("name", ["md", "html", "json", "github"])
def test_a_report_is_as_it_was_agreed(name):
    appendix = Appendix(environment="Python: 3.11", script="import torch\n", script_name="o_proj.py")
    written = render(a_report(), name, appendix)
    file = GOLDEN / f"report.{name}"
    if os.environ.get("KLBENCH_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_bytes(written)
    assert written.decode() == file.read_text()


class Page(html.parser.HTMLParser):
    """The tags, their attributes and the text of a page."""

    VOID = ("meta", "line")

    def __init__(self, content):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere():
    page = Page(render(a_report(), "html").decode())
    assert page.open == []
    assert not {"script", "img", "iframe", "link", "object", "embed", "a"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    policy = dict(page.attributes)["content"]
    assert any("default-src 'none'" in value for name, value in page.attributes if name == "content"), policy
    assert page.tags.count("svg") == 3


def test_a_hostile_session_is_text_in_the_page():
    report = msgspec.convert(hostile(msgspec.to_builtins(a_report())), type(a_report()))
    content = render(report, "html").decode()
    page = Page(content)
    assert page.open == []
    assert "script" not in page.tags
    assert "\x1b" not in content
    assert "\u202e" not in content
    assert "<script>" in "".join(page.words)


def test_a_hostile_session_mentions_nobody_in_an_issue():
    report = msgspec.convert(hostile(msgspec.to_builtins(a_report())), type(a_report()))
    shown = github(report, Appendix(environment=HOSTILE, script=HOSTILE, script_name=HOSTILE))
    outside = "\n".join(outside_of_code(shown))
    assert "@user" not in outside
    allowed = r"</?details>|</?summary>|<!-- -->|\\<"
    assert "<" not in re.sub(allowed, "", outside)


def test_an_issue_stays_under_its_limit_whatever_the_session_holds():
    report = a_report()
    helper = report.runs[0].helpers[0]
    many = [replace(helper.divergent[0], index=index) for index in range(5000)]
    masked = [{"module": f"model.layers.{index}." + "x" * 100} for index in range(3000)]
    run = replace(report.runs[0], helpers=[replace(helper, divergent=many)])
    origin = replace(report.located[0], result={**report.located[0].result, "masked": masked})
    big = replace(report, runs=[run], located=[origin], notes=["n" * 500] * 300)
    shown = github(big, Appendix(environment="e" * 10**6, script="s\n" * 10**6, script_name="x.py"))
    assert len(shown.encode()) <= MAX_BYTES
    assert "Cut here" in shown
    small = github(report, Appendix(environment="e"))
    assert "Cut here" not in small
    assert small.count("<details>") == small.count("</details>") > 3


def test_the_shortest_command_keeps_what_decides_the_numbers():
    long = (
        "KLBENCH_NONCE=1 PYTHONPATH=/x SGLANG_X=1 /v/bin/python3 -m sglang.launch_server --model-path '/m a' "
        "--host 127.0.0.1 --port=3 --page-size 16 --decode-log-interval 8 --sleep-on-idle --tp 2"
    )
    assert shortest_command(long) == (
        "SGLANG_X=1 python -m sglang.launch_server --model-path '/m a' --page-size 16 --tp 2"
    )
    assert shortest_command("'unclosed") == "'unclosed"


# -- plots --------------------------------------------------------------------------------------------------


def test_the_plots_count_every_token_once():
    plots = helper_plots(COLUMNS)
    assert sum(part.tokens for part in plots.bins) == 6
    assert sum(part.divergent for part in plots.bins) == 3
    assert plots.equal_tokens + plots.not_finite + sum(count for _, count in plots.histogram) == 6
    assert (plots.equal_tokens, plots.not_finite) == (3, 1)
    assert dict(plots.histogram)[0.1] == 1
    assert [part.first for part in plots.bins if part.divergent] == [5, 7, 8]


def test_a_helper_without_tokens_has_empty_plots():
    plots = helper_plots(make_columns(prompt_len=[3], decode=[[]], prefill=[[]], dropped=[True]))
    assert plots.bins == []
    assert "<svg" in position_svg(plots)
    assert "<svg" in histogram_svg(plots)


def test_the_map_shows_the_origin_and_refuses_what_is_no_map():
    drawn = map_svg(MAP)
    assert drawn.count('class="origin"') == 1
    assert "layer 1, rows 268 to 268: origin" in drawn
    for damaged in ({}, {**MAP, "cells": [[0]]}, {**MAP, "positions": []}, {**MAP, "cells": "x"}):
        assert map_svg(damaged) is None
    wide = {**MAP, "positions": list(range(5000)), "cells": [[0] * 4999 + [3], [0] * 5000, [0] * 5000]}
    assert map_svg(wide).count('class="origin"') == 1
    assert map_svg({**MAP, "layers": ["</svg><script>", "b", "c"]}).count("<script>") == 0


# -- redaction ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("see /home/alice/models/qwen", "see <path>/qwen"),
        ("PYTHONPATH=/a/b:/c/d", "PYTHONPATH=<path>/b:<path>/d"),
        ("--model-path=/data/x/y", "--model-path=<path>/y"),
        ("~/work/sglang is edited", "<path>/sglang is edited"),
        ("http://gpu7.example.com:30000/generate", "http://<host>:30000/generate"),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("from 10.1.2.3 to 127.0.0.1", "from <address> to 127.0.0.1"),
        ("--api-key s3cret --tp 2", "--api-key *** --tp 2"),
        ("HF_TOKEN=hf_abcdefghijkl", "HF_TOKEN=***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("key sk-abcdefgh12345678 here", "key *** here"),
        ("mail a.b@example.org", "mail <email>"),
        ("GPU-1a2b3c4d-0000 is busy", "<gpu> is busy"),
        ("alice on gpu-box-7", "<name> on <name>"),
        ("malice stays, 3 tokens/s and 1/2 too", "malice stays, 3 tokens/s and 1/2 too"),
        ("sglang 0.5.23, torch 2.14.1", "sglang 0.5.23, torch 2.14.1"),
    ],
)
def test_what_is_redacted(before, after):
    assert Redactor(frozenset({"alice", "gpu-box-7"})).text(before) == after


def test_a_redacted_report_still_names_the_operator_and_no_path():
    report = Redactor(frozenset({"h7"})).report(a_report())
    shown = write_html(blocks(report), title="x")
    assert "model.layers.1.self_attn.o_proj" in shown
    assert "/s/20261129" not in shown
    assert report.runs[0].helpers[0].divergent == a_report().runs[0].helpers[0].divergent
