"""The workbench in lines: what a screen shows is said in words, what a key does is done by a word."""

import asyncio
import os
import subprocess
import sys

import investigated
import pytest
import recorded
from pilots import NOW, scripted_runner

from klbench import settings
from klbench.cli import main, plain
from klbench.errors import UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.tui.actions import BY_ID

FIRST = recorded.first_dirty("prefill_cache_hit")


@pytest.fixture
def session(tmp_path):
    return investigated.investigated(tmp_path / "20251129-dense")


class Listener:
    """A bench whose lines are kept."""

    def __init__(self, path, *, readonly=True) -> None:
        self.lines: list[str] = []
        folder = SessionFolder(path)
        self.bench = plain.LineBench(folder, readonly=readonly, say=self.lines.append, clock=lambda: NOW)
        self.bench.look()

    async def tell(self, line: str) -> list[str]:
        """What is said of a line."""
        self.lines.clear()
        assert await self.bench.obey(line)
        self.bench.look()
        return list(self.lines)


def test_every_command_has_words_and_is_named_by_its_name_its_key_and_its_beginning():
    for name in plain.NAMES:
        assert plain.about_command(name).endswith(".")
        assert plain.named(name) == name
    by_key = {"o": "locate", "r": "run", "v": "verdict", "O": "origin", "X": "experiments", "M": "census",
              "W": "guide_all", "@": "commands", "e": "report", "x": "cancel", "a": "agree", "u": "continue",
              "U": "start_server", "?": "help", "q": "quit", "L": "like"}  # fmt: skip
    assert {key: plain.named(key) for key in by_key} == by_key
    assert plain.named("loc") == "locate"
    assert plain.named("co") is None  # continue, commands, control
    assert plain.named("D") is None  # nothing is drawn that could be compact


@pytest.mark.parametrize("kind", ["investigated", "measuring", "empty"])
async def test_every_command_says_something_in_whole_lines_that_a_terminal_can_be_shown(
    kind, tmp_path, monkeypatch
):
    async def started(_folder):
        return "a runner was started"

    async def nobody(_folder):
        raise UsageError("nobody works on this session")

    # A runner of its own would start a real server, and outlive the test.
    for name in ("continue_session", "start_server_again"):
        monkeypatch.setattr(plain.link, name, started)
    monkeypatch.setattr(plain.link, "attach", nobody)
    path = tmp_path / "20251129-dense"
    if kind == "empty":
        recorded.start(path)
    else:
        (investigated.investigated if kind == "investigated" else recorded.measuring)(path)
    listener = Listener(path)
    for name in plain.NAMES:
        if name == "quit":
            continue
        said = await listener.tell(name) if name != "stop" else ["-"]
        assert said, name
        assert all(line.strip() and "\n" not in line for line in said), name
    assert not await listener.bench.obey("quit")
    assert await listener.tell("") == []
    assert "there is no command 'frobnicate': help lists them" in await listener.tell("frobnicate")


async def test_requests_tokens_and_verdict_are_said_with_their_numbers(session):
    listener = Listener(session)
    said = await listener.tell("requests 2")
    assert said[0] == "prefill_cache_hit: 10 of 96 requests diverged"
    assert said[1].startswith(f"request {listener.bench.model.request}: ")
    assert said[-1] == "8 more diverged"
    said = await listener.tell("tokens 2 1")
    assert said[0].startswith(
        "request 2: 30 of 32 tokens differ, from offset 0 (position 124) on; prompt 124"
    )
    assert said[1].startswith("position 124, offset 0, token #276: decode -2.15")
    assert said[2:] == ["29 more tokens differ"]
    assert (await listener.tell("tokens 4096"))[0].startswith("there is no such request")
    assert (await listener.tell("tokens two"))[0].startswith("tokens: ")
    assert (await listener.tell("helper mat"))[0] == "match: 0 of 96 requests diverged"
    said = await listener.tell("verdict")
    assert said[:2] == ["RUN 1 · FOUND · grade probable", "different function (condition 2)"]
    assert any(line.startswith("what decides it, make wide_restore: ") for line in said)
    assert "wide_restore: not made, the verdict proposes it" in await listener.tell("X")
    said = await listener.tell("origin")
    assert (
        "the origin, model.layers.1.self_attn.attn: inputs equal, state not observed, output differs, 41 ulps"
        in said
    )
    assert any("step 4 of 7, next: settle condition 2" in line for line in await listener.tell("guide_all"))


async def test_hostile_tokens_are_spelled_out(finished, capsys):
    from klbench.cli import table

    listener = Listener(finished)
    said = await listener.tell(f"tokens {FIRST} 200")
    for line in said:
        table.out(line)
    shown = capsys.readouterr().out
    assert "'[/INST]'" in shown
    assert not any(ord(c) < 32 and c != "\n" for c in shown)


async def test_what_cannot_be_done_says_the_reason_of_the_screens(session):
    listener = Listener(session, readonly=False)
    assert await listener.tell("run") == [
        "not now: no runner is attached: U on the main screen starts the server again"
    ]
    assert await listener.tell("cancel") == ["not now: nothing is running"]
    helped = await listener.tell("help")
    assert f"cancel, or x: {BY_ID['cancel'].help} Not now: nothing is running." in helped
    assert len(helped) == len(plain.NAMES)


async def test_what_is_typed_reaches_the_runner(tmp_path):
    path = investigated.at_work(tmp_path / "20251129-dense")
    async with scripted_runner(path) as told:
        listener = Listener(path, readonly=False)
        for line in ("run", "locate 7", "locate 7 relaunch", "make pad alone", "take_census", "report", "o"):
            assert await listener.tell(line) == [], line
        assert (await listener.tell("make"))[0].startswith("make: ")
        await listener.bench._attachment.close()
    worst = listener.bench.model.request
    helper = investigated.HELPER
    assert told == [
        cmd.Run(),
        cmd.Locate(helper=helper, request=7),
        cmd.Locate(helper=helper, request=7, relaunch=True),
        cmd.Experiment(names=["pad", "alone"]),
        cmd.Census(),
        cmd.Report(),
        cmd.Locate(helper=helper, request=worst),
    ]


async def test_what_happens_is_told_once_as_it_happens(tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    async with scripted_runner(path):
        listener = Listener(path)
        recorded.begin_run(recorder)
        recorded.run_helper(recorder, 1, "match", dirty=False)
        said = await listener.tell("")
        assert "match · generation arm · 32 requests" in said
        assert any(line.startswith("match · clean") for line in said)
        recorded.run_helper(recorder, 1, "prefill_cache_hit", dirty=True)
        recorded.end_run(recorder)
        said = await listener.tell("")
        assert "Found: different function (condition 2) · probable" in said
        assert any(line.startswith("Next: ") for line in said)
        assert await listener.tell("") == []
        result = recorded.located(FIRST, "prefill_cache_hit")
        done = {"run": 1, "helper": "prefill_cache_hit", "request": FIRST, "result": result, "elapsed_s": 1.0}
        recorder.add(ev.Located(locate=1, **done))
        said = await listener.tell("")
        assert said == [f"Origin of request {FIRST}: model.layers.1.self_attn.attn (probable) · press o",
                        next(line for line in said if line.startswith("Next: "))]  # fmt: skip
        recorder.add(ev.JobStarted(job=3, kind="replay", title="it"))
        recorder.add(ev.Trouble(level="error", what="it cannot be", why="so it is", next="look"))
        recorder.add(ev.JobEnded(job=3, outcome="failed", elapsed_s=0.1))
        said = await listener.tell("")
        assert said[:3] == ["✗ it cannot be", "so it is", "Next: look"]
        assert "job 3 ended: failed" in said
        recorder.add(ev.Asked(what="Flush the cache of that server?", why="2 requests run on it."))
        said = await listener.tell("")
        assert said == ["Flush the cache of that server?", "2 requests run on it.",
                        "Press a to agree, x to cancel."]  # fmt: skip
    said = [line for _ in range(plain._LIFE_STEPS) for line in await listener.tell("")]
    assert "the runner has ended" in said[0]
    assert len(said) == len(set(said))


async def test_the_input_s_end_leaves_and_the_work_goes_on(session):
    lines: list[str] = []
    bench = plain.LineBench(SessionFolder(session), readonly=True, say=lines.append, clock=lambda: NOW)
    typed: asyncio.Queue[str | None] = asyncio.Queue()
    for line in ("requests 1", None):
        typed.put_nowait(line)
    await bench.work(typed)
    assert lines[0].startswith("klbench · dense demo · fault restore-key")
    assert "type a command, or help" in lines
    assert lines[-1].endswith("more diverged")
    assert len(lines) == len(set(lines))


def test_open_in_lines_needs_no_terminal_and_a_wrong_start_says_how(session):
    command = [sys.executable, "-m", "klbench", "--plain", "open", str(session)]
    done = subprocess.run(
        command,
        input="requests 1\nq\nnever read\n",
        capture_output=True,
        text=True,
        env={**os.environ, "TERM": "dumb"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefill_cache_hit: 10 of 96 requests diverged" in done.stdout
    assert "\x1b" not in done.stdout
    assert main(["--plain"]) == 2


def test_as_a_setting_it_is_for_those_who_type(session, monkeypatch, capsys):
    monkeypatch.setenv(settings.BY_KEY["workbench.plain"].variable, "on")
    assert main(["open", str(session)]) == 0  # no terminal: the session is printed
    assert "type a command" not in capsys.readouterr().out
