"""How digest capture grows: models of 4, 12 and 36 layers, prompts of 128 to 8,192 tokens.

    $ uv run python -m tests.bench.growth --keep points.jsonl --write
    | layers | prompt | row digests | bytes | scoring forward | decode step |

One request is scored cold, and continued by a few decode steps on its cached prompt, each without and with
digests on one server. Times are those of the scheduler's thread on the processor; behind each stands what
digests make of it; then sglang's own dumper, as far as its files stay below some gigabytes. The lines below
the table are the constants of growth: for bytes and for added time the two that come nearest to all rows, and
how far the worst row is from them, so that "linear in tokens x operators" can be checked. A row digest is
that of one token's row in one tensor of one operator; a tensor counts once for each forward.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from klbench.core.trace import Arm
from klbench.engine.traces import read_trace
from klbench.zoo import plain_token_ids
from tests.bench.capture import Meter, usage
from tests.bench.measure import benchmark, markdown, publish, timed, where
from tests.bench.models import Shape, model_folder
from tests.insitu.zoo_server import zoo_server

DEPTHS = (4, 12, 36)
PROMPTS = (128, 512, 2048, 8192)
STEPS = 64
MODES = ("off", "digest")
DUMPER_STEPS = 8
DUMPER_MOST = 36 * 2048
"""Layers times tokens of the prompt: so much the dumper may write, about 3 GB. More says nothing new."""
LONG = 4096
"""Prompts from here on are measured once: without digests they take minutes."""
HEAD = (
    "layers", "prompt", "row digests", "tensors", "bytes", "scoring forward", "decode step",
    "dumper: bytes, files", "its scoring", "its decode step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dumped:
    """The same by the stock dumper, once."""

    size_bytes: int
    files: int
    scoring_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One depth and prompt length: seconds without and with digests, and what the digests of scoring took."""

    layers: int
    prompt: int
    rows: int
    tensors: int
    digested_bytes: int
    """The bytes whose digests were taken."""
    traced: tuple[int, int]
    """Row digests and tensors of the whole trace, with the short request that registers the hooks."""
    size_bytes: int
    scoring_s: tuple[float, float]
    step_s: tuple[float, float]
    dumper: Dumped | None = None

    @property
    def window(self) -> int:
        """Rows of K and V that attention reads in a decode step."""
        return 2 * self.layers * self.prompt

    @property
    def shown(self) -> list[str]:
        return [
            str(self.layers),
            f"{self.prompt:,}",
            f"{self.rows:,}",
            f"{self.tensors:,}",
            f"{self.size_bytes / 1e6:.2f} MB",
            f"{self.scoring_s[0] * 1e3:,.0f} ms, ×{self.scoring_s[1] / self.scoring_s[0]:.2f}",
            f"{self.step_s[0] * 1e3:.1f} ms, ×{self.step_s[1] / self.step_s[0]:.2f}",
            *self._shown_dumper(),
        ]

    def _shown_dumper(self) -> list[str]:
        if self.dumper is None:
            return ["–", "–", "–"]
        size, files = f"{self.dumper.size_bytes / 1e6:,.0f} MB", f"{self.dumper.files:,}"
        return [
            f"{size} in {files}: {self.dumper.size_bytes / self.size_bytes:.0f} times the digests'",
            f"×{self.dumper.scoring_s / self.scoring_s[0]:.2f}",
            f"×{self.dumper.step_s / self.step_s[0]:.1f}",
        ]


def scored(meter: Meter, prompt: Sequence[int], mode: str, folder: Path) -> float:
    with meter.capturing(folder, mode):
        took_s, _ = meter.timed("s", prompt, 0, 0)
    return took_s


def dumped(meter: Meter, prompt: Sequence[int], folder: Path) -> Dumped:
    """The request by the stock dumper; its files are gone afterwards."""
    scoring_s = scored(meter, prompt, "dumper", folder / "scoring")
    size_bytes, files = usage(folder / "scoring")
    shutil.rmtree(folder / "scoring")
    steps = stepped(meter, prompt, folder / "steps", modes=("dumper",), count=DUMPER_STEPS)
    shutil.rmtree(folder)
    return Dumped(size_bytes, files, scoring_s, steps["dumper"])


def stepped(
    meter: Meter, prompt: Sequence[int], folder: Path, *, modes: Sequence[str] = MODES, count: int = STEPS
) -> dict[str, float]:
    """Seconds of a decode step behind the cached prompt, in each mode."""
    meter.flush()
    # Fills the cache, uncaptured: its id is not armed.
    meter.timed("g", prompt, 1, armed=False)
    taken = {}
    for mode in modes:
        with meter.capturing(folder / mode, mode, flush=False):
            one_s, _ = meter.timed("g", prompt, 1)
            many_s, _ = meter.timed("g", prompt, count + 1)
        taken[mode] = (many_s - one_s) / count
    return taken


def point(meter: Meter, layers: int, tokens: int, rounds: int) -> Point:
    prompt = np.random.default_rng(tokens).choice(plain_token_ids(), tokens).tolist()
    scoring: dict[str, list[float]] = {mode: [] for mode in MODES}
    steps: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="klbench-bench-") as name:
        # The first forward of a length takes longer: it is not counted.
        scored(meter, prompt, "off", Path(name) / "first")
        for number in range(1 if tokens >= LONG else rounds):
            place = Path(name) / str(number)
            for mode in MODES:
                scoring[mode].append(scored(meter, prompt, mode, place / "scoring" / mode))
            for mode, took_s in stepped(meter, prompt, place / "steps").items():
                steps[mode].append(took_s)
        folder = Path(name) / "0" / "scoring" / "digest"
        trace = read_trace(folder)
        size_bytes, _ = usage(folder)
        affordable = layers * tokens <= DUMPER_MOST
        by_dumper = dumped(meter, prompt, Path(name) / "dumper") if affordable else None
    scoring_forwards = np.unique(trace.row_forward[trace.row_arm == Arm.SCORING])
    scoring_tensors = np.isin(trace.tensor_forward, scoring_forwards)
    return Point(
        layers=layers,
        prompt=tokens,
        rows=int(trace.tensor_rows[scoring_tensors].sum()),
        tensors=int(np.count_nonzero(scoring_tensors)),
        digested_bytes=int((trace.tensor_rows * trace.tensor_row_bytes)[scoring_tensors].sum()),
        traced=(len(trace.digest), len(trace.tensor_rows)),
        size_bytes=size_bytes,
        scoring_s=(statistics.median(scoring["off"]), statistics.median(scoring["digest"])),
        step_s=(statistics.median(steps["off"]), statistics.median(steps["digest"])),
        dumper=by_dumper,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """`value = first * a + second * b` over all points; `worst` is the largest deviation, by the scales."""

    first: float
    second: float
    worst: float


def fitted(value: Sequence[float], a: Sequence[float], b: Sequence[float], scale: Sequence[float]) -> Fit:
    """The constants, at least 0, with the least squares of the deviations as parts of `scale`."""
    per = np.asarray(scale, dtype=np.float64)
    target = np.asarray(value, dtype=np.float64) / per
    parts = np.array([a, b], dtype=np.float64).T / per[:, None]

    def deviations(chosen: list[int]) -> tuple[float, list[float]]:
        best = np.zeros(2)
        best[chosen] = np.linalg.lstsq(parts[:, chosen], target, rcond=None)[0]
        off = parts @ best - target
        return (float((off**2).sum()) if best.min() >= 0 else np.inf), [*best, float(np.abs(off).max())]

    _, found = min(deviations(chosen) for chosen in ([0, 1], [0], [1]))
    return Fit(*found)


def constants(points: Sequence[Point]) -> list[str]:
    """The lines below the table. Times are off by parts of the whole forward, whose noise they carry."""
    traced = [list(column) for column in zip(*(one.traced for one in points), strict=True)]
    sizes = [float(one.size_bytes) for one in points]
    size = fitted(sizes, *traced, scale=sizes)
    tensors = [one.tensors for one in points]
    scoring, step = (
        fitted([after - before for before, after in taken], per, tensors, [after for _, after in taken])
        for taken, per in (
            ([one.scoring_s for one in points], [one.rows for one in points]),
            ([one.step_s for one in points], [one.window for one in points]),
        )
    )
    largest = max(points, key=lambda one: one.digested_bytes)
    speed = largest.digested_bytes / (scoring.first * largest.rows + scoring.second * largest.tensors)
    return [
        f"- bytes: {size.first:.1f} for each row digest and {size.second:,.0f} for each tensor; "
        f"no row of the table is more than {size.worst:.0%} off",
        f"- scoring: {scoring.first * 1e6:.2f} µs for each row digest and {scoring.second * 1e6:.0f} µs for "
        f"each tensor; no forward is more than {scoring.worst:.0%} off",
        f"- a decode step: {step.second * 1e6:.0f} µs for each tensor and {step.first * 1e6:.2f} µs for each "
        f"row of K or V that attention reads; no step is more than {step.worst:.0%} off",
        f"- that is {speed / 1e9:.2f} GB/s of rows in the largest scoring; the floor, one core that adds up "
        f"the words of memory, makes {bandwidth() / 1e9:.1f} GB/s",
    ]


def bandwidth() -> float:
    """Bytes a second of one core that reads and adds up, the best of a few passes: the floor of a digest."""
    words = np.ones(1 << 25, dtype=np.uint64)
    return words.nbytes / min(timed(words.sum).cpu_s for _ in range(5))


def measured(file: Path) -> list[Point]:
    """The points that a run before has kept."""
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Point) for line in file.read_bytes().splitlines()]


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--depths", type=int, nargs="*", default=DEPTHS)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of points: each is added, none measured twice")
    given = parser.parse_args()
    points = [] if given.keep is None else measured(given.keep)
    for layers in given.depths:
        there = {one.prompt for one in points if one.layers == layers}
        if there >= set(given.prompts):
            continue
        model = model_folder(Shape(layers=layers, heads=1, kv_heads=1, context=2 * max(given.prompts)))
        with zoo_server("dense", ["--disable-cuda-graph", "--sleep-on-idle"], model=model) as server:
            meter = Meter(server)
            for tokens in given.prompts:
                if tokens in there:
                    continue
                points.append(point(meter, layers, tokens, given.rounds))
                print(points[-1], flush=True)
                if given.keep is not None:
                    with given.keep.open("ab") as file:
                        file.write(msgspec.json.encode(points[-1]) + b"\n")
    points.sort(key=lambda one: (one.layers, one.prompt))
    table = markdown(HEAD, [one.shown for one in points])
    publish("bench-growth", [where(), "", *table, "", *constants(points)], write=given.write)


if __name__ == "__main__":
    main()
