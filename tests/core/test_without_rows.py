"""Inputs without rows whose size is a multiple of a small batch: seen in rows there, and whole elsewhere."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from little_transformer import Model, Plant, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Finding
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Direction, Phase, Trace

TOKENS = list(range(5, 19))
PROMPT = 8
Run = Callable[[Model, list[int], int], np.ndarray]


@dataclasses.dataclass
class Sinks(Model):
    """Its attention is given sinks too. Forwards of one row show them as its own, all others as a whole."""

    whole_bytes: int = 8
    whole_tensors: list[int] = dataclasses.field(default_factory=list)

    def _tensor(self, path: str, direction: Direction, argument: int, values: list[int]) -> None:
        super()._tensor(path, direction, argument, values)
        if not path.endswith(".attn") or direction != Direction.IN or argument != 1:
            return
        super()._tensor(path, direction, 2, [77])
        if len(values) > 1:
            self.whole_tensors.append(len(self.columns["tensor_rows"]) - 1)
            self.columns["tensor_row"][-1] = -1

    def trace(self) -> Trace:
        trace = dataclasses.replace(super().trace(), arguments=("0", "1", "sinks"))
        trace.tensor_row_bytes[self.whole_tensors] = self.whole_bytes
        return trace


def found(model: Model, run: Run) -> list[Finding]:
    divergent = run(model, TOKENS, PROMPT)
    trace = model.trace()
    return list(localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings)


def in_decode(_arm: Arm, position: int, phase: Phase) -> bool:
    return position >= 9 and phase == Phase.DECODE


def on_restore(_arm: Arm, _position: int, phase: Phase) -> bool:
    return phase == Phase.RESTORED


@pytest.mark.parametrize("observes_state", [False, True])
@pytest.mark.parametrize(
    ("place", "when", "run", "kind"),
    [
        ("attn", in_decode, run_match, "operator"),
        ("restore", on_restore, run_prefill_cache_hit, "state_restore"),
        ("write", in_decode, run_match, "state_write"),
    ],
)
def test_a_fault_is_found_as_if_there_were_no_such_input(
    place: str, when: Callable[[Arm, int, Phase], bool], run: Run, kind: str, observes_state: bool
) -> None:
    plants = (Plant(0, place, when),)
    plain = found(Model(2, plants=plants, observes_state=observes_state), run)

    sinks = found(Sinks(2, plants=plants, observes_state=observes_state), run)

    assert sinks == plain
    assert len(plain) == 1
    assert kind in plain[0].kinds


def test_a_whole_tensor_of_another_size_is_not_what_the_rows_are() -> None:
    """A tensor that has rows and was not recognised: its rows were not compared, and the finding says so."""
    plants = (Plant(0, "attn", in_decode),)

    (finding,) = found(Sinks(2, plants=plants, observes_state=True, whole_bytes=8 * 13), run_match)

    assert finding.kinds == ("not_observed",)
