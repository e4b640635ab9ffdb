"""Where a fault can be put: wraps that undo themselves, the running forward, its requests, their K/V rows.

A fault wraps functions of the loaded model and nothing else; `Wraps.undo` puts back exactly what was there,
or says that somebody else has wrapped it since. What a module computes under a wrap of its own `forward` is,
to hooks, the module's own output. `Moments` tells a wrap which requests' rows stand where in the forward.
"""

import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

_REMEMBERED_REQUESTS = 65536

Around = Callable[..., Any]
"""Called as around(original, *args, **kwargs) in the place of original(*args, **kwargs)."""


class Wraps:
    """Everything that one arming has put into the process."""

    def __init__(self) -> None:
        self._undo: List[Callable[[], None]] = []

    def around(self, owner: Any, name: str, around: Around) -> None:
        """Puts `around` in the place of the attribute `name` of this one object."""
        own = vars(owner).get(name)
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is not wrapper:
                raise RuntimeError(f"{name} of {type(owner).__name__} was wrapped by somebody else since")
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def around_method(self, owner: type, name: str, around: Around) -> None:
        """Puts `around` in the place of a method of a class; `original` is bound to the instance called."""
        function = inspect.getattr_static(owner, name)

        @functools.wraps(function)
        def wrapper(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return around(functools.partial(function, instance), *args, **kwargs)

        setattr(owner, name, wrapper)

        def undo() -> None:
            if inspect.getattr_static(owner, name) is not wrapper:
                raise RuntimeError(f"{owner.__name__}.{name} was wrapped by somebody else since")
            setattr(owner, name, function)

        self._undo.append(undo)

    def before_call(self, module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Changes the first tensor that is handed to `module`, before whatever else watches its inputs."""

        def hook(_: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            first = next(iter(kwargs))
            return args, {**kwargs, first: change(kwargs[first])}

        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Takes everything out again, the latest first; the first trouble is raised when all is done."""
        trouble: Optional[Exception] = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


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

    def decode_steps(self, rid: str) -> int:
        """How many decode steps the request has made."""
        known = self._known.get(rid)
        return known.decode_steps if known is not None else 0

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


@dataclass(frozen=True)
class Part:
    """One request's rows in a forward: `row` is where they begin in the batch, `index` the request's place.

    They are positions [prefix_len, seq_len). `restored`: its first forward, behind a prefix from the cache.
    `step` counts decode steps from 1; 0 in an extend. `continues`: a later chunk of its prompt. `retracted`:
    it has decoded, and is computed again.
    """

    rid: str
    index: int
    row: int
    prefix_len: int
    seq_len: int
    restored: bool
    step: int
    continues: bool = False
    retracted: bool = False

    @property
    def rows(self) -> int:
        return self.seq_len - self.prefix_len


@dataclass(frozen=True)
class Moment:
    """The forward that runs, or ran last; `runs` tells which of both.

    `number` counts forwards since the faults were armed, from 1.
    """

    number: int
    batch: Any
    rows: int
    parts: Tuple[Part, ...]
    runs: bool = False


class Moments:
    """Reads each forward's batch before it runs; `now` is the latest."""

    def __init__(self) -> None:
        self._history = RequestHistory()
        self.now = Moment(0, None, 0, ())

    def begin(self, batch: Any) -> None:
        rids = batch.rids or []
        mode = batch.forward_mode
        if mode.is_decode():
            parts = self._decode_parts(rids, batch.seq_lens.tolist())
        elif mode.is_extend() and batch.extend_prefix_lens_cpu is not None:
            parts = self._extend_parts(rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)
        else:
            parts = []
        self.now = Moment(self.now.number + 1, batch, int(batch.input_ids.shape[0]), tuple(parts), True)

    def end(self) -> None:
        """The forward that was begun has ended."""
        self.now = replace(self.now, runs=False)

    def _decode_parts(self, rids: Sequence[str], seq_lens: Sequence[int]) -> List[Part]:
        return [
            Part(
                rid, index, index, int(tokens) - 1, int(tokens), False, self._history.decode(rid, int(tokens))
            )
            for index, (rid, tokens) in enumerate(zip(rids, seq_lens, strict=False))
        ]

    def _extend_parts(self, rids: Sequence[str], prefixes: Any, lengths: Any) -> List[Part]:
        parts = []
        row = 0
        for index, rid in enumerate(rids):
            prefix, rows = int(prefixes[index]), int(lengths[index])
            decoded = self._history.decode_steps(rid) > 0
            first = self._history.extend(rid, prefix, rows)
            parts.append(
                Part(
                    rid,
                    index,
                    row,
                    prefix,
                    prefix + rows,
                    restored=first and prefix > 0,
                    step=0,
                    continues=not first and not decoded,
                    retracted=first and decoded,
                )
            )
            row += rows
        return parts


def module_at(model: Any, layer: int, *names: str) -> Any:
    """The layer's module by the first of `names` that it has. Raises ValueError where it has none."""
    for name in names:
        # A module that layers share has a path in each.
        for path, module in model.named_modules(remove_duplicate=False):
            if path.endswith(f"layers.{layer}.{name}"):
                return module
    raise ValueError(f"the model has no layers.{layer}.{names[0]} on this rank")


def attention_at(model: Any, layer: int) -> Any:
    """The layer's attention. Raises ValueError where it has none."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention) and module.layer_id == layer:
            return module
    raise ValueError(f"the model has no attention in layer {layer} on this rank")


def window_of(attention: Any) -> Optional[int]:
    """How many rows before its own a row of this attention sees; None for all of them."""
    window = getattr(attention, "sliding_window_size", None)
    return int(window) if window is not None and window > -1 else None


def slots_of(layer_id: int, batch: Any, index: int, positions: "slice | List[int]") -> torch.Tensor:
    """The pool slots of a request's positions, as this layer's buffers number them."""
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

    slots = get_req_to_token_pool().req_to_token[batch.req_pool_indices[index], positions]
    pool = get_token_to_kv_pool()
    layers = getattr(pool, "layers_mapping", None)
    if layers is not None and layers[layer_id][1]:
        return pool.translate_loc_from_full_to_swa(slots.long())
    return slots.long()


def kv_buffers(layer_id: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The layer's pool of keys and of values, [slots, heads, head size] each."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    return pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)


def nudged(tensor: torch.Tensor, ulps: int) -> torch.Tensor:
    """A copy in which the largest element of each row (last dimension) is `ulps` units farther from zero."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    result = tensor.clone()
    largest = result.abs().argmax(dim=-1, keepdim=True)
    # The bit pattern of a float counts up with its magnitude, whatever its sign.
    moved = (result.gather(-1, largest).view(bits) + ulps).view(result.dtype)
    return result.scatter_(-1, largest, moved)
