"""Comparing one prefill with another: klbench beside sglang's own comparator on what both can read.

    $ uv run --with polars python -m tests.bench.comparator --write        the comparator wants polars
    | what | time | of |

The case is the one that sglang's comparator handles: one request, uncached, unchunked, prefilled twice, once
to generate and once to score. The comparator reads the two dumps, with and without its start and imports;
klbench reads the digests that were made in the server in the same two forwards, aligns and localises.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.engine.capture_control import Backend, CaptureControl
from klbench.engine.traces import read_trace
from klbench.zoo import plain_token_ids, seeded_prompts
from tests.bench.measure import benchmark, markdown, publish, take_turns, where
from tests.insitu.zoo_server import ZooServer, zoo_server

PROMPT_TOKENS = 300
_FLOOR, _CAP = 1 << 30, 1 << 40

# The comparator as a function, so that its start and its imports can be left out.
_WITHOUT_START = """
import contextlib, io, sys, time
from sglang.srt.debug_utils.comparator import entrypoint
arguments = sys.argv[1:]
began = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    sys.argv = ["comparator", *arguments]
    entrypoint.main()
print("compared:", time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Case:
    """Dumps of the two forwards, and digests of both in one folder."""

    generation: Path
    scoring: Path
    digests: Path

    @property
    def tensors(self) -> int:
        return len(list(self.scoring.rglob("*.pt")))


class Maker:
    """Prefills one prompt twice on a server, captured."""

    def __init__(self, server: ZooServer) -> None:
        self._server = server
        self._control = CaptureControl(server.control_dir, server.nonce, [0])
        self._passes = 0
        self._prompt = seeded_prompts(1, PROMPT_TOKENS, 11, plain_token_ids())[0]

    def prefill(self, arm: str) -> None:
        self._passes += 1
        self._server.flush()
        body = {
            "rid": [f"klb-{self._server.nonce}-{self._passes}{arm}+-0"],
            "input_ids": [self._prompt],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1 if arm == "g" else 0},
            "return_logprob": True,
            "logprob_start_len": 0 if arm == "s" else -1,
        }
        self._server.post("/generate", body)

    def captured(self, folder: Path, backend: Backend, arms: str) -> Path:
        folder.mkdir(mode=0o700)

        async def opened() -> None:
            await self._control.open(folder, free_floor_bytes=_FLOOR, size_cap_bytes=_CAP, backend=backend)

        asyncio.run(opened())
        for arm in arms:
            self.prefill(arm)
        asyncio.run(self._control.close())
        return folder

    def case(self, place: Path) -> Case:
        self.captured(place / "first", "dumper", "g")  # registers the hooks
        return Case(
            self.captured(place / "generation", "dumper", "g"),
            self.captured(place / "scoring", "dumper", "s"),
            self.captured(place / "digests", "digest", "gs"),
        )


def comparator(case: Case) -> list[str]:
    return [
        *("--baseline-path", str(case.generation), "--target-path", str(case.scoring)),
        *("--output-format", "json"),
    ]


def whole_command(case: Case) -> None:
    command = [sys.executable, "-m", "sglang.srt.debug_utils.comparator", *comparator(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the comparator failed: {done.stderr[-2000:]}")


def without_start(case: Case) -> float:
    """Seconds that the comparator itself takes."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_START, *comparator(case)], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("compared:"):
            return float(line.split()[1])
    raise SystemExit(f"the comparator failed: {done.stderr[-2000:]}")


def ours(case: Case) -> tuple[int, str]:
    """Reads, aligns and localises; how many digests, and what was found."""
    trace = read_trace(case.digests)
    alignment = align(trace, 0)
    # Nothing was generated and compared: what the head makes of these rows nobody uses.
    found = localise(trace, [alignment], np.zeros(0, dtype=np.int64), first_token=PROMPT_TOKENS * 2)
    proved = (
        f"{len(alignment.pairs.position)} rows proved equal in place" if alignment.proved else "not aligned"
    )
    return len(trace.digest), f"{proved}; {len(found.findings)} origins"


def lines(rounds: int) -> list[str]:
    if importlib.util.find_spec("polars") is None:
        raise SystemExit(
            "sglang's comparator wants polars: uv run --with polars python -m tests.bench.comparator"
        )
    with (
        tempfile.TemporaryDirectory(prefix="klbench-bench-") as text,
        zoo_server("dense", ["--disable-cuda-graph"]) as server,
    ):
        case = Maker(server).case(Path(text))
        digests, verdict = ours(case)
        taken = take_turns(
            {"theirs": lambda: whole_command(case), "ours": lambda: ours(case)},
            rounds,
        )
        alone = sorted(without_start(case) for _ in range(rounds))[rounds // 2]
        tensors = case.tensors
    ours_s = taken["ours"].wall_s
    rows = [
        ["sglang's comparator, the command", f"{taken['theirs'].wall_s:.2f} s", f"{tensors} files"],
        ["the same without its start and imports", f"{alone:.2f} s", f"{tensors} files"],
        [
            f"klbench without its start: read, align, localise ({verdict})",
            f"{ours_s:.3f} s",
            f"{digests:,} row digests",
        ],
    ]
    ratio = f"klbench is {alone / ours_s:.0f}x faster than the comparator without its start"
    return [where(), "", *markdown(["what", "time", "of"], rows), "", ratio]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    publish("bench-comparator", lines(given.rounds), write=given.write)


if __name__ == "__main__":
    main()
