"""Digest capture beside the stock dumper: bytes, files and slowdown for the same request on one server.

    $ python -m tests.bench.capture dense moe swa wide
    dense  bytes: dumper 68.28 MB in 11484 files, digest 1.051 MB in 2, ratio 1/65.0
    dense  decode forward: off 4.97 ms, digest 9.10 ms, dumper 111.77 ms; digest 1.83x, dumper 22.51x
    dense  prefill forward: ...

The request: a prompt of 300 tokens, 64 decode steps, and the cold scoring of all of it. Times are those of
one forward: of a decode step, and of the scoring, each less what a short request takes. They are milliseconds
of processor time of the scheduler's thread, which other work on the machine does not stretch (with `--wall`
those of the clock): medians over the rounds, in which off, digest and dumper take turns. `wide` is the dense
model at width 1024. Targets: bytes at most 1/10 on the demo models and 1/200 at width 1024, forwards slowed
less than twice, state reads counted in. How it grows: `tests.bench.growth`.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.engine.capture_control import Backend, CaptureControl
from klbench.zoo import Kind, plain_token_ids, seeded_prompts
from tests.bench.measure import benchmark, markdown, publish, where
from tests.bench.models import WIDE, model_folder
from tests.insitu.zoo_server import ZooServer, zoo_server

PROMPT_TOKENS = 300
STEPS = 64
MODES = ("off", "digest", "dumper")


@dataclass(frozen=True, slots=True)
class Reading:
    """One round in one mode."""

    decode_ms: float
    prefill_ms: float
    size_bytes: int
    files: int


class Meter:
    """Drives one server; `wall` takes the clock's time instead of the processor's."""

    def __init__(self, server: ZooServer, *, wall: bool = False, first_pass: int = 1) -> None:
        self._server = server
        self._wall = wall
        self._numbers = itertools.count(first_pass)
        self._pid = next(p["pid"] for p in server.presences() if p["role"] == "scheduler")
        self._control = CaptureControl(server.control_dir, server.nonce, [0])

    def _now_s(self) -> float:
        if self._wall:
            return time.perf_counter()
        spent_ns = Path(f"/proc/{self._pid}/task/{self._pid}/schedstat").read_text().split()[0]
        return int(spent_ns) / 1e9

    @contextlib.contextmanager
    def capturing(self, folder: Path, mode: str, *, flush: bool = True) -> Iterator[None]:
        """The mode's capture into a new folder, with an empty cache unless it is kept; the hooks are
        registered already."""
        folder.mkdir(mode=0o700, parents=True)
        if mode != "off":
            backend: Backend = "digest" if mode == "digest" else "dumper"
            asyncio.run(
                self._control.open(folder, free_floor_bytes=1 << 30, size_cap_bytes=1 << 40, backend=backend)
            )
        # The first captured forward registers the hooks: it is not timed.
        self.timed("w", [1, 2, 3, 4], 1)
        if flush:
            self.flush()
        yield
        asyncio.run(self._control.close())
        refused = folder / "invalid-0.json"
        if refused.exists():
            raise SystemExit(f"the trace is invalid: {refused.read_text()}")

    def flush(self) -> None:
        self._server.flush()

    def timed(
        self, arm: str, input_ids: Sequence[int], new_tokens: int, start: int = -1, *, armed: bool = True
    ) -> tuple[float, list[int]]:
        """Seconds that one request takes, and what it generated. `start` 0 scores it from its first token."""
        body = {
            "rid": [f"klb-{self._server.nonce}-{next(self._numbers)}{arm}{'+' if armed else ''}-0"],
            "input_ids": [list(input_ids)],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "logprob_start_len": start,
        }
        began = self._now_s()
        answer = json.loads(self._server.post("/generate", body))[0]
        return self._now_s() - began, answer["output_ids"]


def one_round(meter: Meter, mode: str, steps: int = STEPS) -> Reading:
    """One request generated and scored in one mode; the short request beside it is no part of its bytes."""
    prompt = seeded_prompts(1, PROMPT_TOKENS, 11, plain_token_ids())[0]
    with tempfile.TemporaryDirectory(prefix="klbench-bench-") as name:
        short, whole = Path(name) / "short", Path(name) / "whole"
        with meter.capturing(short, mode):
            one_s, _ = meter.timed("g", prompt, 1)
        with meter.capturing(whole, mode):
            many_s, output = meter.timed("g", prompt, steps + 1)
            meter.flush()
            scoring_s, _ = meter.timed("s", prompt + output, 0, 0)
        return Reading((many_s - one_s) / steps * 1e3, scoring_s * 1e3, *usage(whole))


def usage(folder: Path) -> tuple[int, int]:
    """Bytes and files of a trace or of dumps."""
    sizes = [
        path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix in (".pt", ".safetensors") or path.name.startswith("rank0.json")
    ]
    return sum(sizes), len(sizes)


def measure(name: str, rounds: int, wall: bool) -> dict[str, Reading]:
    """The medians of each mode on one model."""
    kind: Kind = "dense" if name == "wide" else name  # type: ignore[assignment]
    model = model_folder(WIDE) if name == "wide" else None
    with zoo_server(kind, ["--disable-cuda-graph", "--sleep-on-idle"], model=model) as server:
        meter = Meter(server, wall=wall)
        one_round(meter, "off")
        readings: dict[str, list[Reading]] = {mode: [] for mode in MODES}
        for _ in range(rounds):
            for mode in MODES:
                readings[mode].append(one_round(meter, mode))
    return {mode: _median(found) for mode, found in readings.items()}


def _median(readings: list[Reading]) -> Reading:
    def middle(field: str) -> Any:
        return statistics.median(getattr(reading, field) for reading in readings)

    return Reading(middle("decode_ms"), middle("prefill_ms"), int(middle("size_bytes")), int(middle("files")))


def lines(name: str, found: dict[str, Reading]) -> Iterator[str]:
    digest, dumper = found["digest"], found["dumper"]
    yield (
        f"{name:6s} bytes: dumper {dumper.size_bytes / 1e6:.2f} MB in {dumper.files} files, "
        f"digest {digest.size_bytes / 1e6:.3f} MB in {digest.files}, "
        f"ratio 1/{dumper.size_bytes / digest.size_bytes:.1f}"
    )
    for field, what in (("decode_ms", "decode forward"), ("prefill_ms", "prefill forward")):
        plain = getattr(found["off"], field)
        parts = [f"{mode} {getattr(found[mode], field):.2f} ms" for mode in MODES]
        ratios = [f"{mode} {getattr(found[mode], field) / plain:.2f}x" for mode in MODES[1:]]
        yield f"{name:6s} {what}: {', '.join(parts)}; {', '.join(ratios)}"


def table(found: Mapping[str, Mapping[str, Reading]]) -> list[str]:
    """The README's table."""
    head = ["model", "dumper", "digests", "bytes", "decode forward", "scoring forward"]
    rows = []
    for name, modes in found.items():
        off, digest, dumper = (modes[mode] for mode in MODES)
        row = [
            name,
            f"{dumper.size_bytes / 1e6:.1f} MB, {dumper.files} files",
            f"{digest.size_bytes / 1e6:.2f} MB",
            f"1/{dumper.size_bytes / digest.size_bytes:.0f}",
            _times("decode_ms", off, digest, dumper),
            _times("prefill_ms", off, digest, dumper),
        ]
        rows.append(row)
    return markdown(head, rows)


def _times(field: str, off: Reading, digest: Reading, dumper: Reading) -> str:
    plain, digests, dumps = (getattr(reading, field) for reading in (off, digest, dumper))
    return f"{plain:.1f} ms; ×{digests / plain:.2f} with digests, ×{dumps / plain:.1f} with the dumper"


def section(found: Mapping[str, Mapping[str, Reading]], rounds: int, wall: bool) -> list[str]:
    """What the README says of a run."""
    clock = "the clock" if wall else "processor time of the scheduler's thread"
    what = f"{where()}; medians of {rounds} rounds, times by {clock}"
    return [what, "", *table(found)]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("models", nargs="*", default=["dense", "moe", "swa", "wide"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall", action="store_true")
    given = parser.parse_args()
    found = {}
    for name in given.models:
        found[name] = measure(name, given.rounds, given.wall)
        for line in lines(name, found[name]):
            print(line, flush=True)
    publish("bench-capture", section(found, given.rounds, given.wall), write=given.write)


if __name__ == "__main__":
    main()
