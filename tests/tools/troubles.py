"""Runs every test of a trouble or a bad input and writes what was survived into the README.

    uv run python -m tests.tools.troubles            run them, write the table
    uv run python -m tests.tools.troubles --check    run them only

The table stands in the README between its marks; the counts are of test cases that ran and passed here.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from tests.tools.readme import write_part
from tests.troubles import BAD_INPUTS, TROUBLES, is_named, name_of


class Outcomes:
    """The cases that ran, `file::function[case]` below tests/: those that passed, and all others."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.other: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = name_of(report.nodeid)
        if report.failed or (report.skipped and report.when == "setup"):
            self.other.add(case)
        elif report.when == "call":
            self.passed.add(case)


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
    other = {case for case in outcomes.other if is_named(case, tests)}
    passed = {case for case in outcomes.passed if is_named(case, tests)} - other
    ran = passed | other
    survived = not other and all(any(is_named(case, (test,)) for case in ran) for test in tests)
    return f"| {title} | {len(ran)} | {'yes' if survived else f'NO: {len(passed)} of them'} |"


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code; the table is written only where every case passed or was counted."""
    outcomes = Outcomes()
    code = int(pytest.main(["-q", "-m", "faults", "tests"], plugins=[outcomes]))
    lines = table(outcomes)
    print("\n".join(lines))
    if "--check" not in arguments:
        total = len(outcomes.passed - outcomes.other)
        date = datetime.now(UTC).date().isoformat()
        head = f"{total} cases on {date}, written by `uv run python -m tests.tools.troubles`:"
        write_part("troubles", [head, "", *lines])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
