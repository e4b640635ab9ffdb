"""The list of troubles names tests that exist, or says why there is none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.troubles import TROUBLES, named_tests

ROOT = Path(__file__).parent


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("test", sorted(named_tests()))
def test_a_named_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions(ROOT / file)


@pytest.mark.parametrize("number", sorted(TROUBLES))
def test_every_trouble_has_a_test_or_a_reason(number: str) -> None:
    assert bool(TROUBLES[number].tests) != bool(TROUBLES[number].reason)
