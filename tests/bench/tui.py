"""The workbench in a real terminal of 120 x 40: first frame, keys, bytes, memory, 1,000,000 rows.

    $ uv run python -m tests.bench.tui --write
    | tokens | first frame (processor) | over the floor | all tokens open | memory | down (processor) | ...
    | 1,024 | 0.52 s (0.43 s) | 2.1x | 0.24 s | 73 MB | 34 ms (4 ms) | ...

Budgets: first frame under 0.6 s, 1,000,000 rows open in under
1.5 s, a key answers in under 16 ms (median, until the last byte has come), under 300 MB; an idle screen sends
nothing, a live run under 20 KiB/s. Times are those of the clock, which other work on the machine stretches;
those of the processor stand beside them. The floor is the first frame of the smallest application that
Textual can show, one line in the same terminal: what the workbench takes of the processor is given in floors.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tui"))

import recorded
from terminals import Terminal

from klbench.core.columns import HelperColumns
from klbench.session import events as ev
from klbench.session.columns import save_columns
from klbench.session.process_identity import process_start, this_host
from tests.bench.measure import benchmark, markdown, publish, where

ROWS, COLUMNS = 40, 120
REQUESTS = 32
IDLE_S, LIVE_S = 5.0, 10.0
QUIET_S = 0.12
"""An answer has ended when nothing came for so long."""
FLOOR = """
from textual.app import App
from textual.widgets import Static

class Floor(App):
    def compose(self):
        yield Static("q quit")

Floor().run()
"""
HEAD = (
    "tokens", "first frame (processor)", "over the floor", "all tokens open", "memory", "down (processor)",
    "page down (processor)", "sort", "filter", "down, bytes", "page, bytes", "idle", "live run",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """A key's answer: milliseconds to its last byte, those of the processor, and its bytes."""

    ms: float
    size_bytes: int
    cpu_ms: float

    @property
    def shown(self) -> str:
        return f"{self.ms:.0f} ms ({self.cpu_ms:.0f} ms)"


def session_of(folder: Path, tokens: int) -> Path:
    """A session with so many tokens in one helper; 32 requests, a share of them dirty."""
    recorder = recorded.start(folder)
    recorded.launch(recorder)
    options, prompts = {"max_new_tokens": tokens // REQUESTS}, {"count": REQUESTS}
    helpers = ["prefill_cache_hit"]
    recorder.add(ev.RunStarted(run=1, helpers=helpers, prompts=prompts, options=options))
    draw = np.random.default_rng(3)
    new = tokens // REQUESTS
    prompt = draw.integers(40, 400, REQUESTS).astype(np.int64)
    decode = (-4 * draw.random(REQUESTS * new)).astype(np.float32)
    dirty = draw.random(REQUESTS * new) < 0.01
    noise = draw.normal(0, 1e-3, REQUESTS * new).astype(np.float32)
    columns = HelperColumns(
        helper="prefill_cache_hit",
        prompt_len=prompt,
        cached_generation=prompt - 1,
        cached_scoring=np.zeros(REQUESTS, np.int64),
        output_len=np.full(REQUESTS, new, np.int64),
        dropped=np.zeros(REQUESTS, np.bool_),
        start=np.arange(REQUESTS + 1, dtype=np.int64) * new,
        token_id=draw.integers(260, 280, REQUESTS * new).astype(np.int32),
        decode_nats=decode,
        prefill_nats=np.where(dirty, decode + noise, decode).astype(np.float32),
        prompt_start=np.concatenate([[0], np.cumsum(prompt)]).astype(np.int64),
        prompt_ids=np.zeros(int(prompt.sum()), np.int32),
    )
    save_columns(folder / "runs" / "1-prefill_cache_hit.npz", columns)
    recorder.add(
        ev.HelperEnded(
            run=1, helper="prefill_cache_hit", result=recorded.result(columns),
            columns="runs/1-prefill_cache_hit.npz", elapsed_s=1.0,
        )
    )  # fmt: skip
    recorded.end_run(recorder)
    return folder


def answer(terminal: Terminal, key: bytes) -> Answer:
    """What a key brings, until nothing came for QUIET_S; the emulator shows it afterwards, for it is slow."""
    spent_s, began = processor_s(terminal), time.perf_counter()
    last, written = began, b""
    terminal.press(key)
    while select.select([terminal.master], [], [], QUIET_S if written else 5.0)[0]:
        written += os.read(terminal.master, 65536)
        last = time.perf_counter()
    cpu_ms = 1000 * (processor_s(terminal) - spent_s)
    terminal.take(written)
    return Answer(1000 * (last - began), len(written), cpu_ms)


def median(terminal: Terminal, keys: list[bytes]) -> Answer:
    """The median answer to the keys."""
    answers = [answer(terminal, key) for key in keys]
    ms, size_bytes, cpu_ms = (
        statistics.median(getattr(one, name) for one in answers) for name in ("ms", "size_bytes", "cpu_ms")
    )
    return Answer(ms, int(size_bytes), cpu_ms)


def processor_s(terminal: Terminal) -> float:
    """Seconds of the processor, over all threads; the clock's number is that of clock_getcpuclockid(3)."""
    return time.clock_gettime(~terminal.process.pid << 3 | 2)


def until_s(terminal: Terminal, seen: Callable[[str], bool], began: float) -> float:
    """Seconds from `began` until the screen shows it; the screen is read whenever bytes have come."""
    while not seen(terminal.text):
        if time.perf_counter() - began > 60:
            raise TimeoutError(terminal.text)
        terminal.read(0.05)
    return time.perf_counter() - began


def first_frame(session: Path, *, floor: bool = False) -> tuple[float, float]:
    """Seconds until the footer is there, by the clock and of the processor; of the floor instead."""
    began = time.perf_counter()
    what = {"script": FLOOR} if floor else {"flags": []}
    terminal = Terminal(session, rows=ROWS, columns=COLUMNS, **what)
    try:
        wall_s = until_s(terminal, lambda text: "q quit" in text, began)
        return wall_s, processor_s(terminal)
    finally:
        terminal.close()


def row_of(folder: Path, tokens: int, rounds: int) -> list[str]:
    """One line of the table."""
    session = session_of(folder / f"{tokens}", tokens)
    first_frame(session)  # warms the disk's cache
    # In turn, as whatever else the machine does slows both; the least of each is what it takes.
    pairs = [(first_frame(session), first_frame(session, floor=True)) for _ in range(rounds)]
    first, spent = (statistics.median(frame[index] for frame, _ in pairs) for index in (0, 1))
    floors = min(frame[1] for frame, _ in pairs) / min(floor[1] for _, floor in pairs)
    terminal = Terminal(session, rows=ROWS, columns=COLUMNS, flags=[])
    try:
        until_s(terminal, lambda text: "of 32 diverged" in text, time.perf_counter())
        terminal.settle()
        began = time.perf_counter()
        terminal.press(b"t")
        opened = until_s(terminal, lambda text: f"of {tokens:,}" in text, began)
        terminal.settle()
        terminal.press(b"g")
        terminal.settle()
        down = median(terminal, [b"j", b"k"] * 15)
        page = median(terminal, [b"\x1b[6~"] * 30)
        sort = sorted_ms(terminal)
        filtered = filter_ms(terminal, tokens)
        memory = psutil.Process(terminal.process.pid).memory_info().rss
        idle = bytes_in(terminal, IDLE_S)
    finally:
        terminal.close()
    return [
        f"{tokens:,}", f"{first:.2f} s ({spent:.2f} s)", f"{floors:.1f}x", f"{opened:.2f} s",
        f"{memory / 1e6:.0f} MB", down.shown,
        page.shown, f"{sort:.0f} ms", f"{filtered:.0f} ms", f"{down.size_bytes}",
        f"{page.size_bytes}", f"{idle} B", f"{live_rate(session) / 1024:.1f} KiB/s",
    ]  # fmt: skip


def sorted_ms(terminal: Terminal) -> float:
    """Milliseconds until the table is sorted the other way around: its column shows the mark."""
    while "request ▲" not in terminal.text:
        terminal.press(b"s")
        terminal.settle()
    began = time.perf_counter()
    terminal.press(b"S")
    took = until_s(terminal, lambda text: "request ▼" in text, began)
    terminal.settle()
    return 1000 * took


def filter_ms(terminal: Terminal, tokens: int) -> float:
    """Milliseconds until `kl>1e-7` has its count, from its last key."""
    terminal.press(b"/")
    terminal.settle()
    terminal.press(b"kl>1e-")
    terminal.settle()
    began = time.perf_counter()
    terminal.press(b"7")
    took = until_s(terminal, lambda text: f"of {tokens:,} · kl>1e-7" in text, began)
    terminal.press(b"\x1b")
    terminal.settle()
    return 1000 * took


def bytes_in(terminal: Terminal, seconds: float) -> int:
    before, end = len(terminal.raw), time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        terminal.read(left)
    return len(terminal.raw) - before


def live_rate(session: Path) -> float:
    """Bytes a second while a run goes on: progress four times and 50 lines of log a second."""
    recorder = recorded.Recorder(session, at=time.time(), seq=1000)
    lock = {"host": this_host(), "pid": os.getpid(), "start": process_start(os.getpid()) or "", "socket": "",
            "taken_at": time.time()}  # fmt: skip
    (session / "lock").write_bytes(msgspec.json.encode(lock))
    recorder.add(ev.RunnerStarted(klbench_version="0", pid=os.getpid(), host="box", target={}, options={}), 0)
    recorded.launch(recorder)
    recorder.add(ev.JobStarted(job=9, kind="run", title="run"))
    recorder.add(
        ev.RunStarted(run=2, helpers=["match"], prompts={"count": 32}, options={"max_new_tokens": 512})
    )
    recorder.add(ev.ArmStarted(run=2, helper="match", arm="generation", requests=32, tokens=16384))
    terminal = Terminal(session, rows=ROWS, columns=COLUMNS, flags=[])
    try:
        until_s(terminal, lambda text: "match running" in text or "Measuring" in text, time.perf_counter())
        terminal.settle()
        before, steps = len(terminal.raw), int(LIVE_S * 4)
        began = time.perf_counter()
        for step in range(steps):
            recorder.add(ev.ArmProgress(run=2, helper="match", arm="generation", done=step * 100, total=16384,
                                        elapsed_s=step / 4, eta_s=40 - step / 4), 0.25)  # fmt: skip
            with open(session / "server" / "server.log", "a", encoding="utf-8") as log:
                log.writelines(f"Decode batch {step}.{i}, #running-req: 32, #token: {i}\n" for i in range(12))
            end = began + (step + 1) / 4
            while (left := end - time.perf_counter()) > 0:
                terminal.read(left)
        return (len(terminal.raw) - before) / (time.perf_counter() - began)
    finally:
        terminal.close()
        (session / "lock").unlink()


def lines(rounds: int) -> list[str]:
    """The table, measured now."""
    with tempfile.TemporaryDirectory(prefix="klbench-bench-") as place:
        os.environ["KLBENCH_HOME"] = place
        rows = [row_of(Path(place), tokens, rounds) for tokens in (1_024, 1_000_000)]
    return [where(), "", *markdown(HEAD, rows)]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often the first frame is measured")
    given = parser.parse_args()
    publish("bench-tui", lines(given.rounds), write=given.write)


if __name__ == "__main__":
    main()
