"""Runs every test of a trouble or a bad input and writes what was survived into the README.

    uv run python -m tests.tools.troubles            run them, write the table
    uv run python -m tests.tools.troubles --check    run them only

The table stands in the README between its marks; the counts are of test cases that ran and passed here.
"""

from __future__ import annotations

import sys
from collections import Counter
from datetime import UTC, datetime

import pytest

from tests.tools.readme import write_part
from tests.troubles import BAD_INPUTS, TROUBLES


class Outcomes:
    """Counts passed and other outcomes by test, `file::function` below tests/."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.other: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, rest = report.nodeid.partition("::")
        name = rest.split("[")[0].rsplit("::", 1)[-1]
        test = f"{file.removeprefix('tests/')}::{name}"
        if report.failed or (report.skipped and report.when == "setup"):
            self.other[test] += 1
        elif report.when == "call":
            self.passed[test] += 1


def table(outcomes: Outcomes) -> list[str]:
    """The lines of the README: one row for each trouble, one for each kind of bad input."""
    lines = ["| trouble | cases | survived |", "|---|---|---|"]
    for number, trouble in TROUBLES.items():
        if trouble.reason:
            lines.append(f"| {number} {trouble.title} | | cannot occur: {trouble.reason} |")
            continue
        lines.append(_row(f"{number} {trouble.title}", trouble.tests, outcomes))
    lines += ["", "| bad input from | cases | refused clearly |", "|---|---|---|"]
    lines += [_row(title, tests, outcomes) for title, tests in BAD_INPUTS.items()]
    return lines


def _row(title: str, tests: tuple[str, ...], outcomes: Outcomes) -> str:
    passed = sum(outcomes.passed[test] for test in tests)
    other = sum(outcomes.other[test] for test in tests)
    return f"| {title} | {passed + other} | {'yes' if passed and not other else f'NO: {passed} of them'} |"


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code; the table is written only where every case passed or was counted."""
    outcomes = Outcomes()
    code = int(pytest.main(["-q", "-m", "faults", "tests"], plugins=[outcomes]))
    lines = table(outcomes)
    print("\n".join(lines))
    if "--check" not in arguments:
        total = sum(outcomes.passed.values())
        date = datetime.now(UTC).date().isoformat()
        head = f"{total} cases on {date}, written by `uv run python -m tests.tools.troubles`:"
        write_part("troubles", [head, "", *lines])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
