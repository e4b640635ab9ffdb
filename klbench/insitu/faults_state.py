"""Faults in the K/V pool: rows stored otherwise than they were given, overwritten later, wrong on a restore.

What is wrong is the pool itself, so it stays wrong in the prefix cache after the fault is off: flush.
"""

from typing import Any, List, Tuple

import torch

from .faults_planting import Planting
from .faults_seams import Part, attention_at, kv_buffers, nudged, slots_of

KEY, VALUE = 0, 1


def plant_restore(planting: Planting, which: int) -> None:
    """The last rows of a restored prefix, `back` before its end, are their neighbour's.

    Only in requests whose prefix length has the given residue, and not in the first `spared` of a batch.
    """
    layer = attention_at(planting.model, planting.parameters["layer"])
    parameters = planting.parameters
    back, count = parameters["back"], parameters["count"]
    modulus, residue, spared = parameters["modulus"], parameters["residue"], parameters["spared"]

    def corrupt_first(original: Any, *args: Any, **kwargs: Any) -> Any:
        for part in planting.moment.parts:
            chosen = part.prefix_len % max(1, modulus) == residue and part.index >= spared
            if part.restored and part.prefix_len > 1 and chosen:
                corrupt(part)
        return original(*args, **kwargs)

    def corrupt(part: Part) -> None:
        low = max(1, part.prefix_len - back)
        positions = list(range(low, min(low + max(1, count), part.prefix_len)))
        # All of them get the row before the first: doing it twice to a shared prefix is doing it once.
        slots = slots_of(layer.layer_id, planting.moment.batch, part.index, [low - 1, *positions])
        rows = kv_buffers(layer.layer_id)[which]
        rows[slots[1:]] = rows[slots[:1]].clone()
        planting.fired(part, sorted({positions[0], positions[-1]}))

    planting.wraps.around(layer, "forward", corrupt_first)


def plant_write(planting: Planting, which: int) -> None:
    """At one decode step of each request the row that is stored is not the row that was given."""
    step = planting.parameters["step"]
    _plant_write(planting, which, lambda part: part.step == step)


def plant_interval_write(planting: Planting) -> None:
    """Decode stores a wrong key at every position that is a multiple of `interval`."""
    interval = max(1, planting.parameters["interval"])
    _plant_write(planting, KEY, lambda part: part.step > 0 and part.prefix_len % interval == 0)


def _plant_write(planting: Planting, which: int, chosen: Any) -> None:
    layer = attention_at(planting.model, planting.parameters["layer"])
    ulps = planting.parameters["ulps"]

    def store_otherwise(original: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        parts: List[Part] = [part for part in planting.moment.parts if chosen(part)]
        given: Tuple[Any, Any] = (k, v)
        if parts and given[which] is not None:
            stored: torch.Tensor = given[which].clone()
            for part in parts:
                stored[part.row] = nudged(stored[part.row], ulps)
                planting.fired(part, [part.prefix_len])
            k, v = (stored, v) if which == KEY else (k, stored)
        return original(q, k, v, *args, **kwargs)

    planting.wraps.around(layer, "forward", store_otherwise)


def plant_overwrite(planting: Planting) -> None:
    """Before one decode step of each request a key row of its prompt is overwritten by its neighbour's."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    step, back = planting.parameters["step"], planting.parameters["back"]

    def overwrite(original: Any, *args: Any, **kwargs: Any) -> Any:
        for part in planting.moment.parts:
            position = part.prefix_len - (step - 1) - back
            if part.step == step and position > 0:
                batch = planting.moment.batch
                source, target = slots_of(layer.layer_id, batch, part.index, [position - 1, position])
                keys = kv_buffers(layer.layer_id)[KEY]
                keys[target] = keys[source].clone()
                planting.fired(part, [position])
        return original(*args, **kwargs)

    planting.wraps.around(layer, "forward", overwrite)
