"""A situation of the table: a run as it was measured, and what the verdict on it must say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klbench.core.columns import HelperColumns
from klbench.core.diagnosis import diagnose

sys.path.insert(0, str(Path(__file__).parent))
from situations import SERVER, Run, from_offset, noise, results_of

ONE, TWO, RACE = "batch_invariance", "different_function", "race"


@dataclass(frozen=True)
class Situation:
    """`leads`: code of the first hypothesis; `next`: codes among the next steps, in this order. Tests share
    these, so that none may change one."""

    name: str
    columns: Sequence[HelperColumns]
    status: str
    conditions: set[str]
    grade: str
    leads: str | None = None
    next: Sequence[str] = ()
    server: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    findings: Sequence[dict[str, Any]] = ()
    experiments: Sequence[dict[str, Any]] = ()
    says: Sequence[str] = ()
    """Codes that must be among the evidence."""

    def verdict(self) -> dict[str, Any]:
        return diagnose(
            results_of(self.columns, **self.missing),
            {part.helper: part for part in self.columns},
            {**SERVER, **self.server},
            findings=self.findings,
            experiments=self.experiments,
        )


SMALL, GROSS = noise(1e-3), from_offset(0, 0.3)
RUN = Run()
