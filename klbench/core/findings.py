"""What localisation says: origins with their evidence, masked operators, and what the origin screen draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["operator", "gap", "state_write", "state_restore", "head", "not_aligned", "not_observed"]
Grade = Literal["confirmed", "probable", "unknown"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a finding. `code` is stable, `text` is a sentence, `values` are its numbers."""

    code: str
    text: str
    values: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "text": self.text, "values": self.values}


@dataclass(frozen=True, slots=True)
class Finding:
    """An origin, grouped by operator and arm.

    `kinds` are all that the evidence leaves, the likeliest first; `kind` is the first of them. Positions are
    row positions. `arm` and `phase` say how the first such row of the decode side was computed; its
    counterpart is always the scoring arm, and which of the two is wrong is not said here.
    """

    kinds: tuple[Kind, ...]
    module: str
    """The module's path; for a gap `A -> B`."""
    call: int
    operator: int
    """Its place in the trace's operator table (a gap's B)."""
    layer: int | None
    request: int
    arm: str
    rank: int
    phase: str
    first_position: int
    count: int
    grade: Grade
    latent: bool
    evidence: tuple[Evidence, ...]
    ulp_max: int | None = None
    replay_m: int | None = None
    """The operator called again alone: the smallest number of rows that changes the first row's bits."""

    @property
    def kind(self) -> Kind:
        return self.kinds[0]

    def as_dict(self, helper: str) -> dict[str, Any]:
        """The object in `findings` of klbench.locate/1."""
        return {
            "kind": self.kind,
            "kinds": list(self.kinds),
            "module": self.module,
            "layer": self.layer,
            "request": self.request,
            "helper": helper,
            "arm": self.arm,
            "rank": self.rank,
            "phase": self.phase,
            "positions": {"first": self.first_position, "count": self.count},
            "grade": self.grade,
            "evidence": [fact.as_dict() for fact in self.evidence],
            "ulp_max": self.ulp_max,
            "replay_M": self.replay_m,
            "latent": self.latent,
        }


def not_aligned(*, request: int, rank: int, reason: str | None) -> Finding:
    """The finding of a rank whose rows could not be paired."""
    return Finding(
        kinds=("not_aligned",),
        module="",
        call=0,
        operator=-1,
        layer=None,
        request=request,
        arm="generation",
        rank=rank,
        phase="",
        first_position=-1,
        count=0,
        grade="unknown",
        latent=False,
        evidence=(Evidence("not_aligned", reason or "the rows could not be paired", {}),),
    )


@dataclass(frozen=True, slots=True)
class Masked:
    """An operator that never saw equal inputs in a phase: a fault in it could not have been seen there."""

    module: str
    call: int
    layer: int | None
    rank: int
    phase: str
    first_position: int
    rows: int
    because: str
    """The module of the origin in whose cone it lies."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "layer": self.layer,
            "rank": self.rank,
            "phase": self.phase,
            "positions": {"first": self.first_position, "count": self.rows},
            "because": self.because,
        }


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One operator at the origin's row: a line of the table around it. States: equal, differs, not_observed
    or none (there is no such thing); written_equal and written_differs speak of what a state was written from
    where the state as read was not observed."""

    module: str
    call: int
    operator: int
    layer: int | None
    inputs: str
    state: str
    output: str
    origin: bool
    ulp_max: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "layer": self.layer,
            "inputs": self.inputs,
            "state": self.state,
            "output": self.output,
            "origin": self.origin,
            "ulp_max": self.ulp_max,
        }


@dataclass(frozen=True, slots=True)
class Map:
    """Layers (and the head, last) by rows: 0 equal, 1 state differs, 2 differs, 3 origin, -1 not observed."""

    layers: tuple[str, ...]
    positions: tuple[int, ...]
    arms: tuple[str, ...]
    cells: tuple[tuple[int, ...], ...]
    """cells[layer][row]"""

    def as_dict(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "positions": list(self.positions),
            "arms": list(self.arms),
            "cells": [list(row) for row in self.cells],
        }


@dataclass(frozen=True, slots=True)
class Localisation:
    """All of it, origins earliest first."""

    findings: tuple[Finding, ...]
    masked: tuple[Masked, ...]
    around: tuple[Neighbour, ...]
    map: Map | None
    around_position: int | None
    around_arm: str | None
    around_phase: str | None = None
    around_rank: int | None = None
