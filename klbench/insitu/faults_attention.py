"""Faults inside attention: other block orders, missing or extra keys, wrong positions.

Attention is computed again here, from the K/V rows in the pool, in float64; a request's rows at a time.
"""

from typing import Any, List, Sequence, Tuple

import torch

from .faults_planting import Planting
from .faults_seams import Part, attention_at, kv_buffers, module_at, nudged, slots_of, window_of


def plant_blocks(planting: Planting) -> None:
    """Decode sums over blocks of `block` keys, each rounded, as a split-KV kernel does."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    block = planting.parameters["block"]

    def in_blocks(original: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(q, *args, **kwargs)
        for part in planting.moment.parts:
            if part.step and part.seq_len > block:
                edges = [*range(block, part.seq_len, block), part.seq_len]
                _replace(output, part, _attend(layer, planting.moment.batch, q, part, edges))
                planting.fired(part, [part.prefix_len])
        return output

    planting.wraps.around(layer, "forward", in_blocks)


def plant_split(planting: Planting) -> None:
    """An extend splits the keys in the middle of its own rows: where, depends on how many there are."""
    layer = attention_at(planting.model, planting.parameters["layer"])

    def split(original: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(q, *args, **kwargs)
        for part in planting.moment.parts:
            if not part.step and part.rows > 1:
                middle = part.prefix_len + part.rows // 2
                _replace(output, part, _attend(layer, planting.moment.batch, q, part, [middle, part.seq_len]))
                planting.fired(part, [middle, part.seq_len - 1])
        return output

    planting.wraps.around(layer, "forward", split)


def plant_prompt(planting: Planting) -> None:
    """An extend rounds differently when its row count falls into the odd half of a tile."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    half, ulps = max(1, planting.parameters["tile"] // 2), planting.parameters["ulps"]

    def odd_half(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        for part in planting.moment.parts:
            if not part.step and part.rows // half % 2:
                rows = output[part.row : part.row + part.rows]
                rows.copy_(nudged(rows, ulps))
                planting.fired(part, [part.prefix_len, part.seq_len - 1])
        return output

    planting.wraps.around(layer, "forward", odd_half)


def plant_missing_key(planting: Planting) -> None:
    """After some decode steps attention misses the key a few rows back."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    after, back = planting.parameters["after"], planting.parameters["back"]

    def miss_one_key(original: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(q, *args, **kwargs)
        for part in planting.moment.parts:
            if part.step > after and part.prefix_len >= back:
                low = _low(layer, part.prefix_len)
                keys = [p for p in range(low, part.seq_len) if p != part.prefix_len - back]
                _replace(output, part, _attend_to(layer, planting.moment.batch, q, part, keys))
                planting.fired(part, [part.prefix_len])
        return output

    planting.wraps.around(layer, "forward", miss_one_key)


def plant_window(planting: Planting, longer: int) -> None:
    """Decode looks back `longer` rows more than the window (fewer where it is negative)."""
    layer = attention_at(planting.model, planting.parameters["layer"])
    window = window_of(layer)
    if window is None:
        raise ValueError(f"the attention of layer {planting.parameters['layer']} has no window")

    def other_window(original: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(q, *args, **kwargs)
        for part in planting.moment.parts:
            low = part.prefix_len - window - longer
            if part.step and low >= 0 and part.prefix_len > window:
                keys = list(range(low, part.seq_len))
                _replace(output, part, _attend_to(layer, planting.moment.batch, q, part, keys))
                planting.fired(part, [part.prefix_len])
        return output

    planting.wraps.around(layer, "forward", other_window)


def plant_suffix_position(planting: Planting) -> None:
    """The rows computed behind a restored prefix are rotated as if they stood one position further."""
    model, number = planting.model, planting.parameters["layer"]
    rotary = module_at(model, number, "self_attn.rotary_emb")
    running: List[bool] = [False]

    def note_layer(original: Any, *args: Any, **kwargs: Any) -> Any:
        running[0] = True
        try:
            return original(*args, **kwargs)
        finally:
            running[0] = False

    def rotate(original: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if running[0]:
            shifted = positions.clone()
            for part in planting.moment.parts:
                if part.restored:
                    shifted[..., part.row : part.row + part.rows] += 1
                    planting.fired(part, [part.prefix_len, part.seq_len - 1])
            positions = shifted
        return original(positions, *args, **kwargs)

    # Layers share one rotary embedding, so the layer's attention says when it is its own.
    planting.wraps.around(module_at(model, number, "self_attn"), "forward", note_layer)
    planting.wraps.around(rotary, "forward", rotate)


def _low(layer: Any, position: int) -> int:
    window = window_of(layer)
    return 0 if window is None else max(0, position - window)


def _replace(output: torch.Tensor, part: Part, rows: torch.Tensor) -> None:
    """Puts a request's `rows` [rows, heads * head size] in the place of the output's."""
    own = output[part.row : part.row + part.rows]
    own.copy_(rows.reshape(own.shape))


def _query(layer: Any, q: torch.Tensor, part: Part) -> torch.Tensor:
    """The request's queries, [kv heads, heads of each, rows, head size] in float64."""
    heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
    # Some models give [1, rows, heads, head size].
    by_row = q.reshape(-1, kv_heads, heads // kv_heads, layer.qk_head_dim)
    own = by_row[part.row : part.row + part.rows]
    return own.double().permute(1, 2, 0, 3)


def _scored(
    layer: Any, batch: Any, q: torch.Tensor, part: Part, positions: "slice | List[int]"
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scores [kv heads, heads of each, rows, keys], values [kv heads, keys, head size]) in float64."""
    keys, values = kv_buffers(layer.layer_id)
    slots = slots_of(layer.layer_id, batch, part.index, positions)
    scores = _product(_query(layer, q, part), keys[slots].double().permute(1, 2, 0)) * layer.scaling
    return scores, values[slots].double().permute(1, 0, 2)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[kv heads, heads of each, rows, k] times [kv heads, k, n], in float64.

    By way of baddbmm: in deterministic mode sglang puts kernels without float64 in the place of bmm and mm.
    """
    heads, each, rows, inner = a.shape
    zero = a.new_zeros(())
    product = torch.baddbmm(zero, a.reshape(heads, each * rows, inner), b, beta=0)
    return product.reshape(heads, each, rows, -1)


def _rows(weighted: torch.Tensor) -> torch.Tensor:
    """[kv heads, heads of each, rows, head size] -> [rows, heads * head size]."""
    return weighted.permute(2, 0, 1, 3).reshape(weighted.shape[2], -1)


def _attend_to(layer: Any, batch: Any, q: torch.Tensor, part: Part, keys: List[int]) -> torch.Tensor:
    """Attention of one decode row to the keys at the given positions."""
    scores, values = _scored(layer, batch, q, part, keys)
    return _rows(_product(torch.softmax(scores, dim=-1), values))


def _attend(layer: Any, batch: Any, q: torch.Tensor, part: Part, edges: Sequence[int]) -> torch.Tensor:
    """Attention of all the request's rows, in blocks of keys that end at `edges`.

    Each block's result is rounded to the queries' type before the blocks are joined by their weights; where
    one block holds all keys of a row its result is the exact one, rounded once.
    """
    scores, values = _scored(layer, batch, q, part, slice(0, part.seq_len))
    rows = torch.arange(part.prefix_len, part.seq_len, device=q.device)[:, None]
    keys = torch.arange(part.seq_len, device=q.device)[None, :]
    seen = keys <= rows
    window = window_of(layer)
    if window is not None:
        seen &= keys >= rows - window
    scores = scores.masked_fill(~seen, float("-inf"))
    results, weights = [], []
    start = 0
    for end in edges:
        block = scores[..., start:end]
        weights.append(torch.logsumexp(block, dim=-1))
        share = torch.nan_to_num(torch.softmax(block, dim=-1))
        partial = _product(share, values[:, start:end])
        results.append(partial.to(q.dtype).double())
        start = end
    joined = torch.softmax(torch.stack(weights), dim=0)
    return _rows((torch.stack(results) * joined[..., None]).sum(dim=0))
