"""The explanations that are known, from what people met in the field.

Invariants: a hypothesis never looks at a helper's name, only at the paths that requests went; without
deterministic inference its noise hides all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from klbench.core import explain_arithmetic as arithmetic
from klbench.core import explain_functions as functions
from klbench.core import explain_restores as restores
from klbench.core.hypotheses import Hypothesis
from klbench.core.scene import Fact, Scene

EXPLANATIONS: tuple[Callable[[Scene], Hypothesis | None], ...] = (
    arithmetic.not_deterministic,
    functions.not_numbers,
    restores.wrong_restore,
    restores.few_row_extend,
    arithmetic.row_count,
    arithmetic.tile_edge,
    functions.window_slip,
    functions.decode_step,
    functions.interval,
    functions.length_residue,
    functions.chunk_boundary,
    restores.place_in_batch,
    functions.definition,
    arithmetic.floor_not_zero,
    arithmetic.quantised,
    functions.race,
    functions.retraction,
)


def explain(scene: Scene) -> list[Hypothesis]:
    """All explanations that can be meant."""
    found = [hypothesis for make in EXPLANATIONS if (hypothesis := make(scene)) is not None]
    if any(hypothesis.code == "retraction" for hypothesis in found):
        # Decode and prefill have both made rows of every divergent request: their signatures are mixed.
        mixed = Fact("computed_again", "rows that decode made first were made again by a prefill")
        found = [
            replace(h.with_against(mixed), grade="unknown") if h.grade == "probable" else h for h in found
        ]
    if scene.server.get("deterministic") is not False:
        return found
    hidden = Fact("hidden", "the noise of condition 1 hides it: settle that first")
    return [
        h if h.code == "not_deterministic" else replace(h.with_against(hidden), grade="unknown")
        for h in found
    ]
