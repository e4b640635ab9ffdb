"""What the benchmarks share: turns of several ways to do one thing, medians, and the table for the README.

    $ uv run python -m tests.bench.localise --write
    2026-11-30, 2 cores (AMD EPYC), load 0.3, Python 3.11.7, numpy 2.3.5, ...

Numbers of one table come from one run on one machine; ways take turns, so that what else the machine does
falls on all of them alike, and what is compared are ratios. `--write` puts the table into the README, between
the marks that bear the benchmark's name.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.tools.readme import write_part

_LOAD_AT_START = os.getloadavg()[0]
_VERSIONS = ("klbench", "numpy", "textual", "sglang", "torch")


@dataclass(frozen=True, slots=True)
class Taken:
    """One call: seconds of the clock, and of the processor (this process and the children it waited for)."""

    wall_s: float
    cpu_s: float


def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Taken]:
    """Calls each way once per round and returns the median of each; the first round only warms up."""
    seen: dict[str, list[Taken]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = timed(way)
            if number:
                seen[name].append(taken)
    return {
        name: Taken(
            statistics.median(one.wall_s for one in all_of_it),
            statistics.median(one.cpu_s for one in all_of_it),
        )
        for name, all_of_it in seen.items()
    }


def timed(way: Callable[[], object]) -> Taken:
    """What one call takes; processor time counts this process and every child that it waited for."""
    before, began = _processor_s(), time.perf_counter()
    way()
    wall_s = time.perf_counter() - began
    return Taken(wall_s, _processor_s() - before)


def _processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def quiet(command: Sequence[str], **more: object) -> Callable[[], object]:
    """A way that runs a command and throws its output away. It must succeed."""
    return lambda: subprocess.run(list(command), check=True, capture_output=True, **more)  # type: ignore[call-overload]


def where() -> str:
    """Date, machine, its load when the benchmark began, and versions: the line above every table."""
    cores = len(os.sched_getaffinity(0))
    parts = [
        datetime.now(UTC).date().isoformat(),
        f"{cores} cores ({processor()})",
        f"load {_LOAD_AT_START:.1f}",
        f"Python {platform.python_version()}",
        *(f"{name} {found}" for name in _VERSIONS if (found := _version(name)) is not None),
    ]
    return ", ".join(parts)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def benchmark(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has, under its module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser


def publish(name: str, lines: Sequence[str], *, write: bool) -> None:
    """Prints a benchmark's lines, and with `write` puts them between the README's marks of its name."""
    print("\n".join(lines))
    if write:
        write_part(name, ["", *lines, ""])
