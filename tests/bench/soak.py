"""Many runs on one server: does the memory or the number of open files grow, here or in the server?

    $ python -m tests.bench.soak --runs 200
    run    klbench      files  server        files  seconds a run
       1      67.2 MB     13    4192.3 MB    137  85.30
    ...
     200      72.4 MB     13    4198.9 MB    137  1.22
    from run 50 to run 200: klbench: +2.1 MB on 70 MB, files 13 -> 13; server: +2.4 MB on 4196 MB, ...

The first run starts the server; the first quarter is warm-up: allocators and caches fill. Flat means: between
the medians of the second and the last quarter klbench grows by less than 100 kB a run (it holds every run's
results and verdict) and the server by less than 2 %, and neither has more files open. Exit code 1 where one
is not flat.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from klbench.session import commands as cmd
from klbench.session.bench import make_work
from klbench.session.folder import make_session
from klbench.session.request import Options, StartRequest, Target
from klbench.session.runner import Runner

OURS_BYTES_A_RUN = 100_000
THEIRS_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """After one run: resident bytes and open files of klbench and of its server's processes."""

    run: int
    elapsed_s: float
    ours_bytes: int
    ours_files: int
    server_bytes: int
    server_files: int


def sample(run: int, elapsed_s: float) -> Sample:
    own = psutil.Process()
    servers = own.children(recursive=True)
    return Sample(
        run,
        elapsed_s,
        own.memory_info().rss,
        own.num_fds(),
        sum(one.memory_info().rss for one in servers),
        sum(one.num_fds() for one in servers),
    )


def line(one: Sample) -> str:
    return (
        f"{one.run:4d}  {one.ours_bytes / 1e6:8.1f} MB {one.ours_files:6d}  "
        f"{one.server_bytes / 1e6:8.1f} MB {one.server_files:6d}  {one.elapsed_s:.2f}"
    )


async def soak(runs: int, options: Options, folder: Path) -> list[Sample]:
    """The samples after each run."""
    start = StartRequest(target=Target(kind="demo", model="dense"), options=options)
    samples = []
    async with Runner(make_session(folder, *start.as_shown()), start, make_work, attended=True) as runner:
        print("run    klbench      files  server        files  seconds a run", flush=True)
        for number in range(1, runs + 1):
            began = time.monotonic()
            await runner.execute(cmd.Run())
            samples.append(sample(number, time.monotonic() - began))
            if number == 1 or number % max(1, runs // 20) == 0:
                print(line(samples[-1]), flush=True)
        statuses = {helper.status for run in runner.state.runs for helper in run.helpers}
        assert len(runner.state.runs) == runs
        assert statuses == {"clean"}, statuses
    return samples


def verdict(samples: list[Sample]) -> tuple[bool, str]:
    """Whether all is flat, and the numbers that say so."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def medians(name: str) -> tuple[float, float]:
        one, two = (statistics.median(getattr(s, name) for s in part) for part in (early, late))
        return one, two

    told, flat = [], True
    for who in ("ours", "server"):
        before, after = medians(f"{who}_bytes")
        limit = OURS_BYTES_A_RUN * 2 * quarter if who == "ours" else THEIRS_SHARE * before
        files = [max(getattr(s, f"{who}_files") for s in part) for part in (early, late)]
        flat = flat and after - before < limit and files[1] <= files[0]
        name = "klbench" if who == "ours" else "server"
        grown = f"{(after - before) / 1e6:+.1f} MB on {before / 1e6:.0f} MB"
        told.append(f"{name}: {grown}, files {files[0]} -> {files[1]}")
    return flat, f"from run {quarter} to run {len(samples)}: " + "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = Options(samples=given.samples, max_new_tokens=given.max_new_tokens, prompt_tokens=100)
    with tempfile.TemporaryDirectory(prefix="klbench-soak-") as folder:
        samples = asyncio.run(soak(given.runs, options, Path(folder) / "session"))
    flat, told = verdict(samples)
    print(told)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in samples]))
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
