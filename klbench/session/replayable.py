"""Which findings can be replayed: those that blame an operator that can be called again by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klbench.errors import UsageError

_FUNCTIONS = ("lm_head", "logprob")


def check_can_replay(finding: Mapping[str, Any]) -> None:
    """Raises UsageError for a finding that blames no operator that can be called alone."""
    kind, module = str(finding.get("kind")), str(finding.get("module"))
    if any(isinstance(fact, Mapping) and fact.get("code") == "state_probe" for fact in _facts(finding)):
        raise UsageError(
            "there is no operator to replay",
            why="the state probe names layers and positions; it watches no operator",
            next="locate on a server without CUDA graphs, if the divergence shows there",
        )
    if kind != "operator" and not (kind == "head" and module in _FUNCTIONS):
        raise UsageError(
            f"a {kind} cannot be replayed",
            why="only an operator whose output depends on its inputs alone can be called again by itself",
            next="its evidence says what was written and read",
        )


def _facts(finding: Mapping[str, Any]) -> list[Any]:
    evidence = finding.get("evidence")
    return evidence if isinstance(evidence, list) else []
