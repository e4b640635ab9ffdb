"""The list of troubles names tests that exist, or says why there is none, and counts no case for another."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tools.troubles import Outcomes, table
from tests.troubles import BAD_INPUTS, TROUBLES, is_named, name_of, named_tests

ROOT = Path(__file__).parent


def functions(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: node for node in found}


def is_parametrised(test: str) -> bool:
    file, _, name = test.partition("::")
    return any("parametrize" in ast.unparse(node) for node in functions(ROOT / file)[name].decorator_list)


@pytest.mark.parametrize("test", sorted(named_tests()))
def test_a_named_test_exists(test: str) -> None:
    file, _, name = test.partition("[")[0].partition("::")
    assert name in functions(ROOT / file)


def test_a_named_case_exists() -> None:
    cases = [f"tests/{test}" for test in sorted(named_tests()) if "[" in test]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *cases]
    collected = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout[-3000:] + collected.stderr[-3000:]
    assert f"{len(cases)} tests collected" in collected.stdout


@pytest.mark.parametrize("number", sorted(TROUBLES))
def test_every_trouble_has_a_test_or_a_reason(number: str) -> None:
    assert bool(TROUBLES[number].tests) != bool(TROUBLES[number].reason)


@pytest.mark.parametrize(
    "rows",
    [[trouble.tests for trouble in TROUBLES.values()], list(BAD_INPUTS.values())],
    ids=["troubles", "inputs"],
)
def test_no_row_counts_the_cases_of_another(rows: list[tuple[str, ...]]) -> None:
    """A test with several cases that two rows name is about neither: each names its own cases."""
    times = Counter(test for tests in rows for test in set(tests))
    shared = [test for test, count in times.items() if count > 1 and "[" not in test]
    assert [test for test in shared if is_parametrised(test)] == []
    assert [test for test, count in times.items() if count > 1 and "[" in test] == []
    for tests in rows:
        assert [test for test in tests if "[" in test and test.partition("[")[0] in tests] == []


def test_a_case_is_known_by_its_own_name_or_by_its_tests() -> None:
    case = name_of("tests/engine/test_x.py::TestIt::test_that[a::b-c[0]]")
    assert case == "engine/test_x.py::test_that[a::b-c[0]]"
    assert is_named(case, {"engine/test_x.py::test_that"})
    assert is_named(case, {case})
    assert not is_named(case, {"engine/test_x.py::test_that[a]"})


def test_a_row_counts_its_own_cases_and_says_what_did_not_run() -> None:
    outcomes = Outcomes()
    first, second = "engine/test_launching.py::test_each_known_error_has_its_next_step", TROUBLES["T01"].tests
    outcomes.passed = {f"{first}[{name}]" for name in ("backend-refused", "shared-memory", "port")} | {
        second[0]
    }
    outcomes.other = {f"{first}[shared-memory]"}
    lines = {line.split()[1]: line for line in table(outcomes) if line.startswith("| T")}
    assert lines["T02"].endswith("| 1 | yes |")
    assert lines["T05"].endswith("| 1 | NO: 0 of them |")
    assert lines["T01"].endswith("| 1 | NO: 1 of them |"), "its other test did not run"
