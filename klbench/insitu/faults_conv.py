"""Faults in the state of short convolutions: wrong when it is restored, stored, saved or continued.

A slot's state is a sequence's newest inputs, oldest first. What a fault puts into a slot lies there before
the layer runs, so that whoever looks at the state as it is read sees it.
"""

from collections import OrderedDict
from typing import Any, Callable, List, Optional, Tuple

import torch

from . import conv_operator
from .conv_operator import ShortConvolution
from .faults_planting import Planting
from .faults_seams import Part, module_at, nudged

_REMEMBERED_ROWS = 1 << 15

Change = Callable[[torch.Tensor, Part], Optional[torch.Tensor]]
"""Called with the state [channels, behind] of a request's slot; returns another, None to leave it."""


class _Layer:
    """One layer's convolution and where its states are."""

    def __init__(self, planting: Planting) -> None:
        self._planting = planting
        layer = planting.parameters["layer"]
        found = [op for op in conv_operator.install(planting.model) if op.layer_idx == layer]
        if not found:
            raise ValueError(f"the model has no short convolution in layer {layer} on this rank")
        self.operator: ShortConvolution = found[0]
        self.around = module_at(planting.model, layer, "conv")

    @property
    def pool(self) -> Any:
        """The pool of requests' slots; None until the server has made it, which is after the model's load."""
        return self._planting.runner.req_to_token_pool

    @property
    def states(self) -> torch.Tensor:
        """[slots, channels, behind], the pool itself."""
        return self.pool.mamba2_layer_cache(self.operator.layer_idx).conv[0]

    def slots(self) -> List[int]:
        """The slot of each request of the running batch."""
        slots = self.pool.get_mamba_indices(self._planting.moment.batch.req_pool_indices)
        return [int(slot) for slot in self.pool.translate_mamba_indices(slots).tolist()]

    def before(self, chosen: Callable[[Part], bool], change: Change) -> None:
        """Changes the slots of the chosen requests before the layer runs."""

        def changed_first(original: Any, *args: Any, **kwargs: Any) -> Any:
            parts = [part for part in self._planting.moment.parts if chosen(part)]
            if parts:
                slots, states = self.slots(), self.states
                # All of them first: one may be given what another has.
                others = [(part, change(states[slots[part.index]].clone(), part)) for part in parts]
                for part, other in others:
                    if other is not None:
                        states[slots[part.index]] = other
                        first = max(0, part.prefix_len - self.operator.behind)
                        self._planting.fired(part, sorted({first, part.prefix_len - 1}))
            return original(*args, **kwargs)

        self._planting.wraps.around(self.around, "forward", changed_first)


class _Given:
    """What a convolution was given, by request of the run and position: the newest rows of each forward."""

    def __init__(self, planting: Planting, layer: _Layer, back: int) -> None:
        self._rows: "OrderedDict[Tuple[str, int], torch.Tensor]" = OrderedDict()
        self._behind = layer.operator.behind
        newest = self._behind + back

        def remember(original: Any, rows: torch.Tensor, *args: Any) -> Any:
            for part in planting.moment.parts:
                for place in range(max(0, part.rows - newest), part.rows):
                    key = (_request(part), part.prefix_len + place)
                    self._rows.pop(key, None)
                    self._rows[key] = rows[part.row + place].clone()
            while len(self._rows) > _REMEMBERED_ROWS:
                self._rows.popitem(last=False)
            return original(rows, *args)

        planting.wraps.around(layer.operator, "forward", remember)

    def state(self, part: Part, tokens: int) -> Optional[torch.Tensor]:
        """The state [channels, behind] of the part's request after `tokens` tokens; None: not seen."""
        request, rows = _request(part), []
        for position in range(tokens - self._behind, tokens):
            row = self._rows.get((request, position))
            if row is None:
                return None
            rows.append(row)
        return torch.stack(rows, dim=-1)


def _request(part: Part) -> str:
    """The request of the run, the same in each arm."""
    return part.rid.rpartition("-")[2]


def _restored(part: Part) -> bool:
    return part.restored


def plant_depth(planting: Planting) -> None:
    """A restored prefix comes with the state that its convolution had `back` tokens earlier."""
    layer, back = _Layer(planting), planting.parameters["back"]
    given = _Given(planting, layer, back)
    layer.before(_restored, lambda _, part: given.state(part, part.prefix_len - back))


def plant_zeroed(planting: Planting) -> None:
    """A restored prefix comes with an empty state, as a cold request has it."""
    _Layer(planting).before(_restored, lambda state, _: torch.zeros_like(state))


def plant_rounded(planting: Planting) -> None:
    """A restored prefix comes with a state of `bits` bits of mantissa, as a compressed checkpoint has."""
    steps = 2.0 ** (planting.parameters["bits"] + 1)

    def rounded(state: torch.Tensor, _: Part) -> torch.Tensor:
        mantissa, exponent = torch.frexp(state.float())
        return torch.ldexp((mantissa * steps).round() / steps, exponent).to(state.dtype)

    _Layer(planting).before(_restored, rounded)


def plant_other(planting: Planting) -> None:
    """A restored prefix comes with the state of the batch's request before it."""
    _plant_others(planting, _restored)


def plant_slot_reuse(planting: Planting) -> None:
    """Before decode step `step` a request's slot is given away: it holds a state of the batch's next one."""
    step = planting.parameters["step"]
    _plant_others(planting, lambda part: part.step == step)


def _plant_others(planting: Planting, chosen: Callable[[Part], bool]) -> None:
    layer = _Layer(planting)

    def of_another(_: torch.Tensor, part: Part) -> Optional[torch.Tensor]:
        if len(planting.moment.parts) < 2:
            return None
        return layer.states[layer.slots()[part.index - 1]].clone()

    layer.before(chosen, of_another)


def plant_write(planting: Planting) -> None:
    """At decode step `step` the slot gets another input than the convolution was given."""
    layer = _Layer(planting)
    step, ulps = planting.parameters["step"], planting.parameters["ulps"]

    def store_otherwise(original: Any, *args: Any) -> Any:
        result = original(*args)
        parts = [part for part in planting.moment.parts if part.step == step]
        slots = layer.slots() if parts else []
        for part in parts:
            newest = layer.states[slots[part.index], :, -1]
            newest.copy_(nudged(newest, ulps))
            planting.fired(part, [part.prefix_len])
        return result

    planting.wraps.around(layer.operator, "forward", store_otherwise)


def plant_chunk(planting: Planting) -> None:
    """A later chunk of a prompt begins with an empty state, as if it were the first one."""
    _Layer(planting).before(lambda part: part.continues, lambda state, _: torch.zeros_like(state))


def plant_checkpoint(planting: Planting) -> None:
    """A checkpoint that is saved while its request goes on holds the state of `late` tokens earlier."""
    layer, late = _Layer(planting), planting.parameters["late"]
    given = _Given(planting, layer, late)

    def saved_otherwise(original: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        original(source, target)
        parts = planting.moment.parts
        if not parts or planting.moment.runs:
            return  # A checkpoint that is restored: copied inside the new owner's forward.
        live = dict(zip(layer.slots(), parts, strict=False))
        for slot, checkpoint in zip(source.tolist(), target.tolist(), strict=True):
            part = live.get(int(slot))
            earlier = given.state(part, part.seq_len - late) if part is not None else None
            if part is not None and earlier is not None:
                layer.states[int(checkpoint)] = earlier
                planting.fired(part, [part.seq_len - 1])

    if layer.pool is not None:
        planting.wraps.around(layer.pool.mamba_pool, "copy_from", saved_otherwise)
        return
    # Planted at the model's load: the pool comes later, and is of this class.
    from sglang.srt.mem_cache.memory_pool import MambaPool

    planting.wraps.around_method(MambaPool, "copy_from", saved_otherwise)
