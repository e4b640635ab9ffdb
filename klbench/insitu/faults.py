"""The fault lab: plants one fault of the catalogue into the loaded model and proves that it fired.

A fault changes what a module computes by wrapping that module's `forward`, so whatever watches the module
(our hooks, sglang's dumper) sees the faulty output as the module's own. It acts on every request alike.
Proof is `fired-<rank>-<pid>.json` in the control folder, written at the first firing and then at most once a
second while the count grows:

    {"fault": "restore-key", "params": {"layer": 1, "back": 4}, "count": 32,
     "first": {"rid": "klb-a1b2-generation-0", "positions": [296], "rows": 32, "forward": 4}}

`positions` are absolute: the corrupted row, the decode row, or the first and last faulty row of the request.
`rows` is how many rows shared the call, `forward` counts the calls of the faulty layer since the model was
loaded, from 1.
"""

import functools
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .faults_catalogue import ArmedFault
from .plugin import write_json_atomically

_PROOF_INTERVAL_S = 1.0
_REMEMBERED_REQUESTS = 65536


def plant(armed: ArmedFault, model_runner: Any, context: Any) -> None:
    """Plants the fault into the runner's model. Raises ValueError where the model has no such place."""
    proof = FiredProof(armed, context)
    _PLANTERS[armed.fault.name](armed.parameters, model_runner.model, proof)
    context.presence.update(faults=[{"name": armed.fault.name, "params": dict(armed.parameters)}])


class FiredProof:
    """Counts firings and keeps the proof file. A firing costs an addition; a timer does the writing."""

    def __init__(self, armed: ArmedFault, context: Any) -> None:
        self._path = context.control_dir / f"fired-{context.rank}-{os.getpid()}.json"
        self._head = {"fault": armed.fault.name, "params": dict(armed.parameters)}
        self._first: Optional[Dict[str, Any]] = None
        self._count = 0
        self._timer: Optional[threading.Timer] = None

    def fired(self, describe: Callable[[], Tuple[str, List[int]]], rows: int, forward: int) -> None:
        """Notes one firing; `describe` gives request and positions and is called for the first only."""
        self._count += 1
        if self._first is None:
            rid, positions = describe()
            self._first = {"rid": rid, "positions": positions, "rows": rows, "forward": forward}
            self._write()
        elif self._timer is None:
            self._timer = threading.Timer(_PROOF_INTERVAL_S, self._write)
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        # Cleared before the count is read: a firing in between starts the next timer.
        self._timer = None
        write_json_atomically(self._path, dict(self._head, count=self._count, first=self._first))


@dataclass
class _Known:
    """What is remembered of a request between its forwards."""

    tokens: int
    decode_steps: int


class RequestHistory:
    """Tells a request's first forward from its later ones, by request id, prefix lengths and decode steps.

    The second chunk of a cold request has a prefix too, but exactly the tokens it had after its last forward;
    a restored prefix belongs to a request that is new or, where an id is used again, begins anew.
    """

    def __init__(self) -> None:
        self._known: "OrderedDict[str, _Known]" = OrderedDict()

    def extend(self, rid: str, prefix_tokens: int, new_tokens: int) -> bool:
        """Notes a row of an extend forward; returns whether it is the request's first forward."""
        known = self._known.get(rid)
        goes_on = (
            known is not None
            and known.tokens == prefix_tokens
            # A decode step may ride in an extend forward (mixed chunks): it has one new token.
            and (known.decode_steps == 0 or new_tokens == 1)
        )
        if goes_on and known is not None:
            known.tokens += new_tokens
        else:
            self._remember(rid, _Known(prefix_tokens + new_tokens, 0))
        return not goes_on

    def decode(self, rid: str, tokens: int) -> int:
        """Notes a decode row after which the request has `tokens`; returns its decode step, from 1."""
        known = self._known.get(rid)
        if known is None:
            known = self._remember(rid, _Known(tokens, 0))
        known.tokens = tokens
        known.decode_steps += 1
        return known.decode_steps

    def _remember(self, rid: str, known: _Known) -> _Known:
        self._known[rid] = known
        self._known.move_to_end(rid)
        if len(self._known) > _REMEMBERED_REQUESTS:
            self._known.popitem(last=False)
        return known


def _attention(model: Any, layer: int) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention) and module.layer_id == layer:
            return module
    raise ValueError(f"the model has no attention in layer {layer} on this rank")


def _o_proj(model: Any, layer: int) -> Any:
    for name, module in model.named_modules():
        if name.endswith(f"layers.{layer}.self_attn.o_proj"):
            return module
    raise ValueError(f"the model has no layers.{layer}.self_attn.o_proj on this rank")


def _wrap_forward(module: Any, around: Callable[..., Any]) -> None:
    """Makes `around(original, *args, **kwargs)` the module's own forward; its signature stays readable."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    module.forward = forward


def _forward_batch(args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
    """The batch among the arguments of RadixAttention.forward(q, k, v, forward_batch, ...)."""
    return kwargs["forward_batch"] if "forward_batch" in kwargs else args[3]


def _one_row(rid: str, position: int) -> Tuple[str, List[int]]:
    return rid, [position]


def _is_decode(batch: Any) -> bool:
    return bool(batch.forward_mode.is_decode())


def _is_extend(batch: Any) -> bool:
    return bool(batch.forward_mode.is_extend()) and batch.extend_prefix_lens_cpu is not None


def _slots(layer_id: int, batch: Any, index: int, positions: "slice | List[int]") -> torch.Tensor:
    """The pool slots of a request's positions, as this layer's buffers number them."""
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

    slots = get_req_to_token_pool().req_to_token[batch.req_pool_indices[index], positions]
    pool = get_token_to_kv_pool()
    layers = getattr(pool, "layers_mapping", None)
    if layers is not None and layers[layer_id][1]:
        return pool.translate_loc_from_full_to_swa(slots.long())
    return slots.long()


def _plant_o_proj_rows(parameters: Any, model: Any, proof: FiredProof) -> None:
    module = _o_proj(model, parameters["layer"])
    if getattr(module, "bias", None) is not None:
        raise ValueError("o_proj-rows needs an o_proj without a bias")
    threshold = parameters["rows"]
    latest: List[Any] = [None]
    calls = [0]

    def remember_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        latest[0] = _forward_batch(args, kwargs)
        return original(*args, **kwargs)

    def first_request() -> Tuple[str, List[int]]:
        batch = latest[0]
        rows = 1 if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu[0]
        return (batch.rids or [""])[0], [int(batch.positions[0]), int(batch.positions[rows - 1])]

    def split_sum(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if x.shape[0] < threshold:
            return original(x, *args, **kwargs)
        middle = x.shape[-1] // 2
        left, right = x.clone(), x.clone()
        left[..., middle:] = 0
        right[..., :middle] = 0
        # RowParallelLinear returns (output, bias), and may write both times to one buffer of its caller.
        half_sum = original(left, *args, **kwargs)[0].clone()
        output, *rest = original(right, *args, **kwargs)
        output.add_(half_sum)
        proof.fired(first_request, x.shape[0], calls[0])
        return (output, *rest)

    _wrap_forward(_attention(model, parameters["layer"]), remember_batch)
    _wrap_forward(module, split_sum)


def _plant_restore_key(parameters: Any, model: Any, proof: FiredProof) -> None:
    layer = _attention(model, parameters["layer"])
    back = parameters["back"]
    history = RequestHistory()
    calls = [0]

    def corrupt_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = _forward_batch(args, kwargs)
        calls[0] += 1
        rids = batch.rids or []
        if _is_extend(batch):
            rows = sum(batch.extend_seq_lens_cpu)
            for index, rid in enumerate(rids):
                prefix = batch.extend_prefix_lens_cpu[index]
                first = history.extend(rid, prefix, batch.extend_seq_lens_cpu[index])
                if first and prefix > 1:
                    corrupt(batch, index, rid, max(1, prefix - back), rows)
        elif _is_decode(batch):
            for rid, tokens in zip(rids, batch.seq_lens.tolist(), strict=False):
                history.decode(rid, tokens)
        return original(*args, **kwargs)

    def corrupt(batch: Any, index: int, rid: str, position: int, rows: int) -> None:
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        # Its neighbour's key, so that doing it twice to a shared prefix is doing it once.
        source, target = _slots(layer.layer_id, batch, index, [position - 1, position])
        keys = get_token_to_kv_pool().get_key_buffer(layer.layer_id)
        keys[target] = keys[source]
        proof.fired(functools.partial(_one_row, rid, position), rows, calls[0])

    _wrap_forward(layer, corrupt_first)


def _plant_decode_window(parameters: Any, model: Any, proof: FiredProof) -> None:
    layer = _attention(model, parameters["layer"])
    after, back = parameters["after"], parameters["back"]
    history = RequestHistory()
    calls = [0]

    def miss_one_key(original: Callable[..., Any], q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = _forward_batch((q, *args), kwargs)
        calls[0] += 1
        rids = batch.rids or []
        output = original(q, *args, **kwargs)
        if _is_extend(batch):
            for index, rid in enumerate(rids):
                history.extend(rid, batch.extend_prefix_lens_cpu[index], batch.extend_seq_lens_cpu[index])
        elif _is_decode(batch):
            for index, (rid, tokens) in enumerate(zip(rids, batch.seq_lens.tolist(), strict=False)):
                if history.decode(rid, tokens) > after and tokens - 1 >= back:
                    output[index] = without_key(q[index], batch, index, tokens).view(output[index].shape)
                    proof.fired(functools.partial(_one_row, rid, tokens - 1), len(rids), calls[0])
        return output

    def without_key(query: torch.Tensor, batch: Any, index: int, tokens: int) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        window = layer.sliding_window_size
        first = max(0, tokens - 1 - window) if window is not None and window > -1 else 0
        positions = [position for position in range(first, tokens) if position != tokens - 1 - back]
        slots = _slots(layer.layer_id, batch, index, positions)
        pool = get_token_to_kv_pool()
        key = pool.get_key_buffer(layer.layer_id)[slots].double()
        value = pool.get_value_buffer(layer.layer_id)[slots].double()
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        grouped = query.double().view(kv_heads, heads // kv_heads, layer.qk_head_dim)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, key) * layer.scaling, dim=-1)
        return torch.einsum("hgn,nhd->hgd", weights, value).to(query.dtype)

    _wrap_forward(layer, miss_one_key)


_PLANTERS: Dict[str, Callable[[Any, Any, FiredProof], None]] = {
    "o_proj-rows": _plant_o_proj_rows,
    "restore-key": _plant_restore_key,
    "decode-window": _plant_decode_window,
}
