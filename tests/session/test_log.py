"""The event log survives every truncation and every stranger."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klbench.errors import UndecidedError
from klbench.session import events as ev
from klbench.session import log as log_module
from klbench.session.log import EventLog, LogTail, read_log

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
events = st.one_of(
    st.builds(ev.Trouble, level=st.sampled_from(["error", "warning"]), what=text, why=text),
    st.builds(ev.Call, line=text, outcome=text, elapsed_s=st.floats(0, 1e6)),
    st.builds(
        ev.ArmProgress,
        run=st.integers(1, 3),
        helper=st.sampled_from(["match", "prefill_cache_hit"]),
        arm=st.just("scoring"),
        done=st.integers(0, 10**9),
        total=st.integers(0, 10**9),
        elapsed_s=st.floats(0, 1e6),
    ),
    st.builds(ev.Unknown, name=text),
)


def write(path, written):
    with EventLog(path) as log:
        return [log.append(event) for event in written]


@given(written=st.lists(events, max_size=8), cut=st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_a_log_cut_at_any_byte_loads_the_events_before_the_cut(tmp_path_factory, written, cut):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    entries = write(path, written)
    content = path.read_bytes()
    end = int(len(content) * cut)
    path.write_bytes(content[:end])
    assert read_log(path) == entries[: content[:end].count(b"\n")]


def test_every_cut_of_one_log_is_mended_and_continued(tmp_path):
    path = tmp_path / "events.jsonl"
    entries = write(path, [ev.Trouble(level="error", what="⏎ \x1b[31m"), ev.RunnerEnded(reason="done")])
    content = path.read_bytes()
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        kept = entries[: content[:end].count(b"\n")]
        added = write(path, [ev.RunnerEnded(reason="again")])
        assert read_log(path) == kept + added
        assert added[0].seq == len(kept) + 1


def test_an_event_of_a_newer_version_is_kept_as_unknown(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, [ev.RunnerEnded(reason="a")])
    newer = {"seq": 2, "at": 5.0, "event": {"type": "dreamt", "of": [1, {"deep": None}]}}
    with path.open("ab") as file:
        file.write(json.dumps(newer).encode() + b"\n")
    write(path, [ev.RunnerEnded(reason="b")])
    assert [entry.event for entry in read_log(path)] == [
        ev.RunnerEnded(reason="a"),
        ev.Unknown(name="dreamt"),
        ev.RunnerEnded(reason="b"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"seq": "x", "at": 0, "event": {}}',
        b'{"seq": 2, "at": 1e999, "event": {"type": "runner_ended"}}',
        b'{"seq": 2, "at": 1, "event": {"type": 7}}',
        b'{"seq": 2, "at": 1, "event": {"type": "runner_ended", "reason": 5}}',
        b"\x00" * 64,
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path, line):
    path = tmp_path / "events.jsonl"
    write(path, [ev.RunnerEnded(reason="a")])
    with path.open("ab") as file:
        file.write(line + b"\n")
    write(path, [ev.RunnerEnded(reason="b")])
    first, damaged, last = read_log(path)
    assert damaged.event in (ev.Damaged(line=2, why="it is no event"), ev.Unknown(name="runner_ended"))
    assert (first.event.reason, last.event.reason) == ("a", "b")


def test_a_line_without_end_is_given_up_and_the_next_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(log_module, "_READ_BYTES", 300)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 5000 + b"\n" + b'{"seq":2,"at":1,"event":{"type":"runner_ended","reason":"r"}}\n')
    entries = read_log(path)
    assert [type(entry.event) for entry in entries] == [ev.Damaged, ev.RunnerEnded]
    assert entries[0].event.line == 1


def test_an_event_too_long_for_a_reader_is_refused_by_the_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        with pytest.raises(UndecidedError, match="does not fit"):
            log.append(ev.RunnerEnded(reason="x" * 1000))
        log.append(ev.RunnerEnded(reason="short"))
    assert [entry.seq for entry in read_log(path)] == [1]


def test_a_tail_sees_an_event_only_when_its_line_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = LogTail(path)
    assert tail.poll() == []
    (entry,) = write(tmp_path / "other.jsonl", [ev.RunnerEnded(reason="done")])
    line = (tmp_path / "other.jsonl").read_bytes()
    for end in range(1, len(line)):
        path.write_bytes(line[:end])
        assert tail.poll() == []
    path.write_bytes(line)
    assert tail.poll() == [entry]
    assert tail.poll() == []


async def test_following_gives_what_a_writer_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    seen = []

    async def read():
        async for entries in LogTail(path).follow(poll_s=0.001):
            seen.extend(entries)
            if len(seen) == 3:
                return

    reader = asyncio.create_task(read())
    with EventLog(path) as log:
        written = []
        for number in range(3):
            written.append(log.append(ev.RunnerEnded(reason=str(number))))
            await asyncio.sleep(0)
        await asyncio.wait_for(reader, 60)
    assert seen == written


def test_a_killed_writer_leaves_whole_events(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import sys, pathlib\n"
        "from klbench.session.log import EventLog\n"
        "from klbench.session.events import Call\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    log.append(Call(line='x' * (n % 4000), outcome=str(n), elapsed_s=0.0))\n"
        "    if n == 200: print('going', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"going\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    entries = read_log(path)
    assert len(entries) > 200
    assert [entry.event.outcome for entry in entries] == [str(n) for n in range(len(entries))]


def test_what_is_appended_is_in_the_file_before_anybody_sees_it(tmp_path):
    path = tmp_path / "events.jsonl"
    seen = []
    with EventLog(path) as log:
        log.on_append = lambda entry: seen.append(read_log(path)[-1] == entry)
        log.append(ev.RunnerEnded(reason="done"))
    assert seen == [True]


def test_a_line_whose_event_was_damaged_is_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, [ev.RunnerEnded(reason="the first"), ev.RunnerEnded(reason="the second")])
    path.write_bytes(path.read_bytes().replace(b"the first", b"the worst"))

    entries = read_log(path)

    assert [entry.event for entry in entries] == [
        ev.Damaged(line=1, why="its checksum is another one"),
        ev.RunnerEnded(reason="the second"),
    ]
