"""Operators with state that hold others (a mixer and its projections), and those that ran past the hooks."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from little_transformer import Model, Plant, mix, run_match, run_prefill_cache_hit

from klbench.core.alignment import align
from klbench.core.findings import Finding
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Direction, Phase, Slot, Trace

PROMPT = 8
TOKENS = [3 + (5 * place) % 11 for place in range(14)]
LAYER = 1
MIXER = f"model.layers.{LAYER}.mixer"
Run = Callable[[Model, list[int], int], np.ndarray]


class Mixing(Model):
    """Its layers are mixers: a projection, a scan that nothing hooks, a norm and a projection.

    The scan's state is read at the first row of a forward and written at its last.
    """

    def _add_operators(self) -> None:
        paths = ["", "model", "model.embed_tokens"]
        for layer in range(self.layers):
            base = f"model.layers.{layer}"
            paths += [base, f"{base}.before", f"{base}.mixer"]
            paths += [f"{base}.mixer.{leaf}" for leaf in ("in_proj", "norm", "out_proj")]
        self.operators = {
            path: number for number, path in enumerate([*paths, "model.norm", "logits_processor"])
        }
        self.left: dict[tuple[int, int], int] = {}

    def _layer(self, layer: int, x: list[int], residual: list[int]) -> tuple[list[int], list[int]]:
        path = f"model.layers.{layer}.mixer"
        x, residual = self._leaf2(f"model.layers.{layer}.before", x, residual, layer, "before")
        self._tensor(path, Direction.IN, 0, x)
        self._event += 1
        x = self._call(f"{path}.in_proj", x, lambda v: mix(3, v), "in_proj", layer)
        x = self._scan(layer, path, x)
        x = self._call(f"{path}.norm", x, lambda v: mix(4, v), "mixer_norm", layer)
        x = self._call(f"{path}.out_proj", x, lambda v: mix(5, v), "out_proj", layer)
        self._tensor(path, Direction.OUT, 0, x)
        self._event += 1
        return x, residual

    def _scan(self, layer: int, path: str, x: list[int]) -> list[int]:
        positions = self._where[1]
        first, last = positions[0], positions[-1]
        state = 0
        if first:
            state = self.left[layer, first - 1]
            for plant in self.plants:
                if (plant.layer, plant.place) == (layer, "restore") and plant.when(
                    self._where[0], first, self._where[2]
                ):
                    state = 0xBAD
            self._slot(Slot.READ, path, first - 1, layer, state)
            for name, value in (
                ("row", self._first_row),
                ("operator", self.operators[path]),
                ("low", 0),
                ("high", first),
                ("digest", (state, mix(state))),
            ):
                self.columns[f"read_{name}"].append(value)
        out = []
        for index, value in enumerate(x):
            state = mix(state, value)
            self.left[layer, positions[index]] = state
            out.append(self._planted(layer, "scan", index, mix(6, state)))
        self._slot(Slot.WRITTEN, path, last, layer, state)
        return out

    def trace(self) -> Trace:
        found = super().trace()
        mixers = [path.endswith(".mixer") for path in self.operators]
        operators = tuple(
            dataclasses.replace(operator, container=True, state="ssm") if mixer else operator
            for operator, mixer in zip(found.operators, mixers, strict=True)
        )
        return dataclasses.replace(found, operators=operators)


def located(trace: Trace, divergent: np.ndarray) -> tuple[Finding, ...]:
    return localise(trace, [align(trace, 0)], divergent, first_token=PROMPT).findings


def mixing(plant: Plant | None, run: Run = run_match, *, observes_state: bool = True) -> tuple[Finding, ...]:
    model = Mixing(3, plants=(plant,) if plant else (), observes_state=observes_state)
    divergent = run(model, TOKENS, PROMPT)
    return located(model.trace(), divergent)


def decoding_from(first: int) -> Callable[[Arm, int, Phase], bool]:
    return lambda arm, at, phase: arm == Arm.GENERATION and phase == Phase.DECODE and at >= first


def restored(arm: Arm, _: int, phase: Phase) -> bool:
    return arm == Arm.GENERATION and phase == Phase.RESTORED


def prompt_rows(arm: Arm, at: int, _: Phase) -> bool:
    return arm == Arm.GENERATION and at in (2, 3)


@pytest.mark.parametrize("run", [run_match, run_prefill_cache_hit])
@pytest.mark.parametrize("observes_state", [False, True])
def test_right_mixers_accuse_nobody(run: Run, observes_state: bool) -> None:
    assert mixing(None, run, observes_state=observes_state) == ()


@pytest.mark.parametrize("observes_state", [False, True])
def test_a_scan_that_differs_is_the_mixers_and_no_gap_between_its_projections(observes_state: bool) -> None:
    (found,) = mixing(Plant(LAYER, "scan", decoding_from(10)), observes_state=observes_state)

    assert (found.kind, found.module, found.first_position, found.count) == ("operator", MIXER, 10, 3)
    # Decode reads the state of a row before which scoring was in the middle of its scan.
    assert "not_observed" in found.kinds


def run_on_a_checkpoint(model: Model, tokens: list[int], prompt: int) -> np.ndarray:
    """The warming arm ends, and leaves its state, where the generation arm begins."""
    model.extend(Arm.WARMING, tokens[: prompt - 1], 0, Phase.EXTEND)
    model.extend(Arm.GENERATION, tokens[prompt - 1 : prompt], prompt - 1, Phase.RESTORED)
    for position in range(prompt, len(tokens) - 1):
        model.decode(Arm.GENERATION, tokens[position], position)
    model.extend(Arm.SCORING, tokens, 0, Phase.EXTEND)
    return model.divergent_tokens(prompt, len(tokens))


def test_a_wrong_restore_of_a_mixers_state_is_a_restore() -> None:
    found = mixing(Plant(LAYER, "restore", restored), run_on_a_checkpoint)

    assert [(f.kinds, f.module, f.first_position) for f in found] == [(("state_restore",), MIXER, PROMPT - 1)]


@pytest.mark.parametrize("observes_state", [False, True])
def test_a_wrong_restore_that_cannot_be_proved_stays_open(observes_state: bool) -> None:
    """Without state, or where nobody was seen to leave the checkpoint."""
    plant = Plant(LAYER, "restore", restored)
    found = mixing(plant, run_prefill_cache_hit, observes_state=observes_state)[0]

    assert (found.kind, found.module, found.first_position) == ("state_restore", MIXER, PROMPT - 1)
    assert len(found.kinds) > 1


@pytest.mark.parametrize("leaf", ["before", "in_proj", "scan", "mixer_norm", "out_proj"])
@pytest.mark.parametrize("observes_state", [False, True])
def test_what_a_mixer_inherits_is_no_second_origin(leaf: str, observes_state: bool) -> None:
    found = mixing(Plant(0, leaf, prompt_rows), observes_state=observes_state)

    assert [(f.first_position, f.count) for f in found] == [(2, 2)]


@pytest.mark.parametrize("leaf", ["in_proj", "mixer_norm", "out_proj"])
def test_the_operators_inside_are_still_told_apart(leaf: str) -> None:
    (found,) = mixing(Plant(LAYER, leaf, decoding_from(9)))

    assert (found.kinds, found.module) == (("operator",), f"{MIXER}.{leaf.removeprefix('mixer_')}")


def without(trace: Trace, module: str, arm: Arm | None = None) -> Trace:
    """The trace as if `module` had been called past its hooks, in all forwards or in those of an arm."""
    number = next(n for n, operator in enumerate(trace.operators) if operator.module == module)
    arms = np.zeros(len(trace.forward_number), dtype=np.int64)
    arms[trace.row_forward] = trace.row_arm

    def kept(operator: np.ndarray, forward: np.ndarray) -> np.ndarray:
        return (operator != number) | ((arms[forward] != arm) if arm is not None else False)

    chosen = {
        "tensor_": kept(trace.tensor_operator, trace.tensor_forward),
        "slot_": kept(trace.slot_operator, trace.slot_forward),
        "read_": kept(trace.read_operator, trace.row_forward[trace.read_row]),
    }
    columns = {
        field.name: getattr(trace, field.name)[mask]
        for field in dataclasses.fields(trace)
        for prefix, mask in chosen.items()
        if field.name.startswith(prefix) and field.name != "tensor_row"
    }
    return dataclasses.replace(trace, **columns)


@pytest.mark.parametrize("arm", [None, Arm.GENERATION])
@pytest.mark.parametrize("observes_state", [False, True])
def test_a_gap_beside_state_that_was_not_seen_admits_every_kind(
    arm: Arm | None, observes_state: bool
) -> None:
    model = Model(2, plants=(Plant(0, "restore", restored),), observes_state=observes_state)
    divergent = run_prefill_cache_hit(model, TOKENS, PROMPT)
    found = located(without(model.trace(), "model.layers.0.attn", arm), divergent)[0]

    assert found.kinds == ("gap", "operator", "state_restore", "state_write", "not_observed")
    assert (found.module.rpartition(" -> ")[2], found.first_position) == ("model.layers.0.o", PROMPT - 1)
    assert found.grade == "unknown"
    fact = next(fact for fact in found.evidence if fact.code == "state_beside_not_observed")
    assert fact.values == {"module": "model.layers.0.attn"}


@pytest.mark.parametrize("observes_state", [False, True])
def test_what_unseen_state_hands_on_is_no_second_gap(observes_state: bool) -> None:
    model = Model(2, plants=(Plant(0, "qkv", prompt_rows),), observes_state=observes_state)
    divergent = run_match(model, TOKENS, PROMPT)
    found = located(without(model.trace(), "model.layers.0.attn"), divergent)

    assert [(f.kinds, f.module) for f in found] == [(("operator",), "model.layers.0.qkv")]


def test_a_gap_in_another_layer_than_the_unseen_state_is_a_gap() -> None:
    model = Model(3, plants=(Plant(2, "before_o", decoding_from(9)),), observes_state=True)
    divergent = run_match(model, TOKENS, PROMPT)
    found = located(without(model.trace(), "model.layers.0.attn"), divergent)

    assert [(f.kinds, f.module) for f in found] == [(("gap",), "model.layers.2.attn -> model.layers.2.o")]
