"""Faults in the K/V pool: rows stored otherwise than they were given, overwritten later, wrong on a restore.

What is wrong is the pool itself, so it stays wrong in the prefix cache after the fault is off: flush.
"""

from typing import Any, Callable, List, Optional, Tuple

import torch

from .faults_planting import Planting
from .faults_seams import Part, attention_at, kv_buffers, nudged, slots_of, window_of

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
            stored = given[which].clone(memory_format=torch.contiguous_format)
            # Some models give [1, rows, heads, head size].
            rows = stored.view(planting.moment.rows, -1)
            for part in parts:
                rows[part.row] = nudged(rows[part.row], ulps)
                if not _stores(args, kwargs):
                    _overwrite(planting, layer.layer_id, which, part, rows[part.row])
                planting.fired(part, [part.prefix_len])
            k, v = (stored, v) if which == KEY else (k, stored)
        return original(q, k, v, *args, **kwargs)

    planting.wraps.around(layer, "forward", store_otherwise)


def _stores(args: Tuple[Any, ...], kwargs: Any) -> bool:
    """Whether the attention stores the K and V that it is given; a fused rotary embedding did it before."""
    return bool(args[1] if len(args) > 1 else kwargs.get("save_kv_cache", True))


def _overwrite(planting: Planting, layer_id: int, which: int, part: Part, row: torch.Tensor) -> None:
    """Puts `row` into the pool where the request's own row was stored."""
    slots = slots_of(layer_id, planting.moment.batch, part.index, [part.prefix_len])
    pool = kv_buffers(layer_id)[which]
    pool[slots] = row.reshape(1, *pool.shape[1:]).to(pool.dtype)


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


def plant_slot_reuse(planting: Planting) -> None:
    """Before one decode step a slot of each prompt is given to the batch's next request."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    step, back = planting.parameters["step"], planting.parameters["back"]

    def another_key(part: Part) -> Optional[Tuple[int, torch.Tensor]]:
        parts = planting.moment.parts
        position = part.prefix_len - (step - 1) - back
        if part.step != step or position < 0 or len(parts) < 2:
            return None
        other = parts[(part.index + 1) % len(parts)]
        slot = slots_of(layer.layer_id, planting.moment.batch, other.index, [other.prefix_len - 1])
        return position, kv_buffers(layer.layer_id)[KEY][slot].clone()

    _plant_key(planting, layer, another_key)


def plant_window_evict(planting: Planting) -> None:
    """In decode the key `inside` rows behind the window's beginning is gone: its slot was freed too early."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    window = window_of(layer)
    if window is None:
        raise ValueError(f"the attention of layer {planting.parameters['layer']} has no window")
    inside = planting.parameters["inside"]

    def nothing(part: Part) -> Optional[Tuple[int, torch.Tensor]]:
        if not part.step or part.prefix_len <= window:
            return None
        keys = kv_buffers(layer.layer_id)[KEY]
        return part.prefix_len - window + inside, torch.zeros_like(keys[:1])

    _plant_key(planting, layer, nothing)


def plant_chunk_key(planting: Planting) -> None:
    """A later chunk of a prompt finds the key `back` rows before it overwritten by that row's neighbour."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    back = planting.parameters["back"]

    def neighbour(part: Part) -> Optional[Tuple[int, torch.Tensor]]:
        position = part.prefix_len - back
        if not part.continues or position < 1:
            return None
        slot = slots_of(layer.layer_id, planting.moment.batch, part.index, [position - 1])
        return position, kv_buffers(layer.layer_id)[KEY][slot].clone()

    _plant_key(planting, layer, neighbour)


def _plant_key(
    planting: Planting, layer: Any, chosen: Callable[[Part], Optional[Tuple[int, torch.Tensor]]]
) -> None:
    """Before the layer runs, `chosen` says for each request which position's key becomes what [1, ...]."""

    def overwrite(original: Any, *args: Any, **kwargs: Any) -> Any:
        for part in planting.moment.parts:
            change = chosen(part)
            if change is not None:
                position, key = change
                slot = slots_of(layer.layer_id, planting.moment.batch, part.index, [position])
                kv_buffers(layer.layer_id)[KEY][slot] = key
                planting.fired(part, [position])
        return original(*args, **kwargs)

    planting.wraps.around(layer, "forward", overwrite)


def plant_stale(planting: Planting) -> None:
    """When a retracted request is computed again, the key `back` rows before its last one stays what it was.

    What it was: the bits that its new slot held, of whoever had it before. A request that gets its own slot
    back finds the very key there, and nothing is wrong.
    """
    layer = attention_at(planting.model, planting.parameters["layer"])
    back = planting.parameters["back"]

    def keep(original: Any, *args: Any, **kwargs: Any) -> Any:
        keys = kv_buffers(layer.layer_id)[KEY]
        kept = []
        for part in planting.moment.parts:
            position = part.seq_len - 1 - back
            if part.retracted and position >= part.prefix_len:
                slot = slots_of(layer.layer_id, planting.moment.batch, part.index, [position])
                kept.append((part, position, slot, keys[slot].clone()))
        result = original(*args, **kwargs)
        for part, position, slot, stale in kept:
            if not torch.equal(stale, keys[slot]):
                keys[slot] = stale
                planting.fired(part, [position])
        return result

    planting.wraps.around(layer, "forward", keep)
