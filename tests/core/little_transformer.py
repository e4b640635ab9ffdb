"""A transformer of integers: makes traces in which the origins are known because they were planted.

Every value is a 64-bit integer and every operator a hash of what it reads, so bits are equal exactly where
all that they were computed from is equal. Arms run as sglang runs them: a cold prefill (whole or in chunks),
a restored prefix, decode steps, a cold scoring. A plant changes what one operator puts out, what a gap passes
on, what is written to the state or what is found there, for chosen rows of chosen arms.
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from klbench.core.origins import HEAD_OPERATORS
from klbench.core.trace import Arm, Direction, Operator, Phase, Slot, Trace

MASK = (1 << 64) - 1
LEAVES = ("norm", "qkv", "rope", "attn", "o", "norm2", "up", "down")
GAPS = ("before_o", "residual")
"""Unhooked steps: between attn and o, and the residual add between o and norm2."""


def mix(*values: int) -> int:
    """A hash that a change of any value changes."""
    total = 0x9E3779B97F4A7C15
    for value in values:
        total = ((total ^ (value & MASK)) * 0xBF58476D1CE4E5B9) & MASK
        total ^= total >> 29
    return total


@dataclass(frozen=True)
class Plant:
    """What is wrong: `place` is a leaf's name, a gap's, "write" or "restore"; it acts where `when` says so.

    `when(arm, position, phase)` of the row that computes (for "restore": that reads).
    """

    layer: int
    place: str
    when: Callable[[Arm, int, Phase], bool]
    absorbed: bool = False
    """The next operator puts out the same bits all the same: a signed zero."""


@dataclass
class Model:
    """Runs forwards and writes them down as a trace."""

    layers: int
    window: int | None = None
    plants: tuple[Plant, ...] = ()
    observes_state: bool = False
    request: int = 0
    operators: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(layer, position) -> pool slot and what is there; one request, so a position has one slot at a time."""
    forward: int = 0
    hidden: dict[tuple[Arm, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [
            *("forward_number", "forward_rank", "forward_rows", "forward_requests"),
            *(
                "row_forward",
                "row_arm",
                "row_request",
                "row_position",
                "row_in_batch",
                "row_phase",
                "row_token",
            ),
            *("tensor_forward", "tensor_operator", "tensor_direction", "tensor_argument", "tensor_event"),
            *("tensor_rows", "tensor_start", "tensor_row", "digest"),
            *("read_row", "read_operator", "read_low", "read_high", "read_digest"),
            *("slot_kind", "slot_forward", "slot_operator", "slot_event", "slot_position", "slot_pool"),
            "slot_digest",
        ]
        self.columns = {name: [] for name in names}
        self._pool = itertools.count(1)
        self._add_operators()

    def _add_operators(self) -> None:
        paths = ["", "model", "model.embed_tokens"]
        for layer in range(self.layers):
            base = f"model.layers.{layer}"
            paths += [base, *(f"{base}.{leaf}" for leaf in LEAVES)]
        paths += ["model.norm", "logits_processor"]
        self.operators = {path: number for number, path in enumerate(paths)}

    # Running.

    def flush(self) -> None:
        self.slots.clear()

    def extend(self, arm: Arm, tokens: list[int], first: int, phase: Phase) -> None:
        self._run(arm, list(enumerate(tokens, first)), phase)

    def decode(self, arm: Arm, token: int, position: int) -> None:
        self._run(arm, [(position, token)], Phase.DECODE)

    def _run(self, arm: Arm, rows: list[tuple[int, int]], phase: Phase) -> None:
        c = self.columns
        number = len(c["forward_number"])
        self.forward += 1
        for name, value in (("number", self.forward), ("rank", 0), ("rows", len(rows)), ("requests", 1)):
            c[f"forward_{name}"].append(value)
        first_row = len(c["row_forward"])
        for index, (position, token) in enumerate(rows):
            for name, value in (
                ("forward", number),
                ("arm", arm),
                ("request", self.request),
                ("position", position),
                ("in_batch", index),
                ("phase", phase),
                ("token", token),
            ):
                c[f"row_{name}"].append(value)
        self._number, self._first_row, self._event = number, first_row, 0
        self._where = (arm, [position for position, _ in rows], phase)
        x = self._call("model.embed_tokens", [t for _, t in rows], lambda t: mix(1, t), "embed", -1)
        residual = [0] * len(rows)
        for layer in range(self.layers):
            x, residual = self._layer(layer, x, residual)
        x = self._leaf2("model.norm", x, residual, self.layers, "norm")[0]
        self._tensor("logits_processor", Direction.IN, 0, x)
        self._event += 1
        for position, value in zip(self._where[1], x, strict=True):
            self.hidden[arm, position] = value

    def _layer(self, layer: int, x: list[int], residual: list[int]) -> tuple[list[int], list[int]]:
        base = f"model.layers.{layer}"
        self._tensor(base, Direction.IN, 0, x)
        self._event += 1
        x, residual = self._leaf2(f"{base}.norm", x, residual, layer, "norm")
        x = self._call(f"{base}.qkv", x, lambda v: mix(3, v), "qkv", layer)
        x = self._call(f"{base}.rope", x, lambda v: mix(4, v), "rope", layer)
        x = self._attention(layer, x)
        x = [self._planted(layer, "before_o", i, v) for i, v in enumerate(x)]
        x = self._call(f"{base}.o", x, lambda v: mix(6, v), "o", layer)
        x = [self._planted(layer, "residual", i, v) for i, v in enumerate(x)]
        x, residual = self._leaf2(f"{base}.norm2", x, residual, layer, "norm2")
        x = self._call(f"{base}.up", x, lambda v: mix(8, v), "up", layer)
        x = self._call(f"{base}.down", x, lambda v: mix(9, v), "down", layer)
        self._tensor(base, Direction.OUT, 0, x)
        self._event += 1
        return x, residual

    def _call(
        self, path: str, x: list[int], compute: Callable[[int], int], place: str, layer: int
    ) -> list[int]:
        self._tensor(path, Direction.IN, 0, x)
        self._event += 1
        out = [self._planted(layer, place, i, compute(v)) for i, v in enumerate(x)]
        self._tensor(path, Direction.OUT, 0, out)
        self._event += 1
        return out

    def _leaf2(
        self, path: str, x: list[int], residual: list[int], layer: int, place: str
    ) -> tuple[list[int], list[int]]:
        """A fused add and norm: two inputs, two outputs."""
        self._tensor(path, Direction.IN, 0, x)
        self._tensor(path, Direction.IN, 1, residual)
        self._event += 1
        absorbs = [self._absorbed(layer, i) if place == "norm2" else 0 for i in range(len(x))]
        total = [mix(7, v ^ lost, r) for v, r, lost in zip(x, residual, absorbs, strict=True)]
        out = [self._planted(layer, place, i, mix(2, v)) for i, v in enumerate(total)]
        self._tensor(path, Direction.OUT, 0, out)
        self._tensor(path, Direction.OUT, 1, total)
        self._event += 1
        return out, total

    def _attention(self, layer: int, x: list[int]) -> list[int]:
        arm, positions, _ = self._where
        path = f"model.layers.{layer}.attn"
        query, key = [mix(10, v) for v in x], [mix(11, v) for v in x]
        self._tensor(path, Direction.IN, 0, query)
        self._tensor(path, Direction.IN, 1, key)
        self._event += 1
        for index, position in enumerate(positions):
            pool = next(self._pool)
            value = self._planted(layer, "write", index, key[index])
            self.slots[layer, position] = (pool, value)
            self._slot(Slot.WRITTEN, path, position, pool, value)
        out = []
        lowest = positions[0]
        for index, position in enumerate(positions):
            low = 0 if self.window is None else max(0, position - self.window)
            lowest = min(lowest, low)
            for plant in self.plants:
                if (plant.layer, plant.place) == (layer, "restore") and plant.when(
                    arm, position, self._where[2]
                ):
                    victim = max(low, position - 2)
                    pool, _ = self.slots[layer, victim]
                    self.slots[layer, victim] = (pool, 0xBAD)
            read = [self.slots[layer, p][1] for p in range(low, position + 1)]
            for name, value in (
                ("row", self._first_row + index),
                ("operator", self.operators[path]),
                ("low", low),
                ("high", position + 1),
                ("digest", (mix(*read), mix(1, *read))),
            ):
                self.columns[f"read_{name}"].append(value)
            out.append(self._planted(layer, "attn", index, mix(5, query[index], *read)))
        for position in range(lowest, positions[-1] + 1):
            pool, value = self.slots[layer, position]
            self._slot(Slot.READ, path, position, pool, value)
        self._tensor(path, Direction.OUT, 0, out)
        self._event += 1
        return out

    def _planted(self, layer: int, place: str, index: int, value: int) -> int:
        arm, positions, phase = self._where
        for plant in self.plants:
            hit = (plant.layer, plant.place) == (layer, place)
            if hit and plant.place != "restore" and plant.when(arm, positions[index], phase):
                value ^= 0x5555
        return value

    def _absorbed(self, layer: int, index: int) -> int:
        arm, positions, phase = self._where
        for plant in self.plants:
            if plant.absorbed and plant.layer == layer and plant.when(arm, positions[index], phase):
                return 0x5555
        return 0

    # Writing down.

    def _tensor(self, path: str, direction: Direction, argument: int, values: list[int]) -> None:
        c = self.columns
        for name, value in (
            ("forward", self._number),
            ("operator", self.operators[path]),
            ("direction", direction),
            ("argument", argument),
            ("event", self._event),
            ("rows", len(values)),
            ("start", len(c["digest"])),
        ):
            c[f"tensor_{name}"].append(value)
        c["tensor_row"] += range(self._first_row, self._first_row + len(values))
        c["digest"] += [(value & MASK, mix(value)) for value in values]

    def _slot(self, kind: Slot, path: str, position: int, pool: int, value: int) -> None:
        for name, entry in (
            ("kind", kind),
            ("forward", self._number),
            ("operator", self.operators[path]),
            ("event", self._event),
            ("position", position),
            ("pool", pool),
            ("digest", (value & MASK, mix(value))),
        ):
            self.columns[f"slot_{name}"].append(entry)

    def trace(self) -> Trace:
        c = self.columns
        digests = ("digest", "read_digest", "slot_digest")
        table = {name: np.array(values, dtype=np.int64) for name, values in c.items() if name not in digests}
        for name in digests:
            values = c[name] if self.observes_state or name == "digest" else []
            table[name] = np.array(values, dtype=np.uint64).reshape(-1, 2)
        if not self.observes_state:
            for name in [name for name in table if name.startswith(("read_", "slot_"))]:
                table[name] = table[name][:0]
        tensors, slots, reads = len(c["tensor_rows"]), len(table["slot_kind"]), len(table["read_row"])
        return Trace(
            backend="synthetic",
            operators=tuple(
                Operator(
                    module=path,
                    class_name=_class_name(path),
                    call=0,
                    order=number,
                    container=path in ("", "model") or path.rsplit(".", 1)[-1].isdigit(),
                    state="kv" if path.endswith(".attn") else None,
                    window=self.window if path.endswith(".attn") else None,
                )
                for path, number in self.operators.items()
            ),
            arguments=("0", "1"),
            dtypes=("int64",),
            observes_state=self.observes_state,
            observes_head=False,
            invalid=None,
            tensor_dtype=np.zeros(tensors, dtype=np.int64),
            tensor_row_bytes=np.full(tensors, 8, dtype=np.int64),
            read_argument=np.ones(reads, dtype=np.int64),
            slot_argument=np.ones(slots, dtype=np.int64),
            slot_request=np.full(slots, self.request, dtype=np.int64),
            **table,
        )

    def divergent_tokens(self, prompt: int, total: int) -> np.ndarray:
        """Positions of the generated tokens whose scoring rows differ between the arms."""
        return np.array(
            [
                position
                for position in range(prompt, total)
                if self.hidden.get((Arm.GENERATION, position - 1))
                != self.hidden.get((Arm.SCORING, position - 1))
            ],
            dtype=np.int64,
        )


class WithHead(Model):
    """The transformer with the head's own operators behind it, and gaps before each of them."""

    def _add_operators(self) -> None:
        super()._add_operators()
        self.operators |= {name: len(self.operators) + place for place, name in enumerate(HEAD_OPERATORS)}
        self.scores: dict[tuple[Arm, int], int] = {}
        self.unseen_inputs: set[str] = set()

    def _tensor(self, path: str, direction: Direction, argument: int, values: list[int]) -> None:
        decodes = self._where[0] == Arm.GENERATION
        if direction == Direction.IN and decodes and path in self.unseen_inputs:
            return
        if path == "logits_processor":
            values = self._after("to_processor", values)
        super()._tensor(path, direction, argument, values)
        if path != "logits_processor":
            return
        self._event += 1
        for name in HEAD_OPERATORS:
            given = self._after(f"to_{name}", values)
            values = self._call(name, given, lambda value: mix(12, value), name, self.layers)
        arm, positions, _ = self._where
        self.scores |= {(arm, at): value for at, value in zip(positions, values, strict=True)}

    def _after(self, gap: str, values: list[int]) -> list[int]:
        return [self._planted(self.layers, gap, place, value) for place, value in enumerate(values)]

    def divergent_tokens(self, prompt: int, total: int) -> np.ndarray:
        rows = [
            at
            for at in range(prompt - 1, total - 1)
            if self.scores[Arm.GENERATION, at] != self.scores[Arm.SCORING, at]
        ]
        return np.array(rows, dtype=np.int64) + 1

    def trace(self) -> Trace:
        found = super().trace()
        operators = tuple(
            dataclasses.replace(operator, class_name="LogitsProcessor")
            if operator.module in HEAD_OPERATORS
            else operator
            for operator in found.operators
        )
        return dataclasses.replace(found, operators=operators, observes_head=True)


def on_ranks(*traces: Trace) -> Trace:
    """One trace of several ranks, each of which was traced as rank 0 of a model with the same operators."""
    columns: dict[str, list[np.ndarray]] = {}
    forwards = rows = digests = 0
    for rank, trace in enumerate(traces):
        for name in (column.name for column in dataclasses.fields(trace)):
            values = getattr(trace, name)
            if not isinstance(values, np.ndarray):
                continue
            if name.endswith("_forward"):
                values = values + forwards
            elif name in ("tensor_row", "read_row"):
                values = values + rows
            elif name == "tensor_start":
                values = values + digests
            elif name.endswith("_rank"):
                values = values + rank
            columns.setdefault(name, []).append(values)
        forwards += len(trace.forward_number)
        rows += len(trace.row_forward)
        digests += len(trace.digest)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return dataclasses.replace(traces[0], **joined)


def _class_name(path: str) -> str:
    if path.endswith("embed_tokens"):
        return "VocabParallelEmbedding"
    return "LogitsProcessor" if path == "logits_processor" else "Module"


def run_match(model: Model, tokens: list[int], prompt: int, chunk: int | None = None) -> np.ndarray:
    """match: a cold prefill (in chunks) and decode, then a cold scoring; returns the divergent positions."""
    step = chunk or prompt
    for first in range(0, prompt, step):
        rows = tokens[first : min(first + step, prompt)]
        model.extend(Arm.GENERATION, rows, first, Phase.CHUNK if first else Phase.EXTEND)
    return _decode_and_score(model, tokens, prompt)


def run_prefill_cache_hit(model: Model, tokens: list[int], prompt: int) -> np.ndarray:
    """prefill_cache_hit: a warming prefill, a one-row extend on the restored prefix, decode, scoring."""
    model.extend(Arm.WARMING, tokens[:prompt], 0, Phase.EXTEND)
    model.extend(Arm.GENERATION, tokens[prompt - 1 : prompt], prompt - 1, Phase.RESTORED)
    return _decode_and_score(model, tokens, prompt)


def run_retracted(model: Model, tokens: list[int], prompt: int) -> np.ndarray:
    """match of a request whose rows 0 to 11 are computed once more in one extend, behind decoded ones."""
    model.extend(Arm.GENERATION, tokens[:prompt], 0, Phase.EXTEND)
    for position in range(prompt, 11):
        model.decode(Arm.GENERATION, tokens[position], position)
    model.flush()
    model.extend(Arm.GENERATION, tokens[:12], 0, Phase.RESUMED)
    model.decode(Arm.GENERATION, tokens[12], 12)
    model.flush()
    model.extend(Arm.SCORING, tokens, 0, Phase.EXTEND)
    return np.array([13])


def _decode_and_score(model: Model, tokens: list[int], prompt: int) -> np.ndarray:
    for position in range(prompt, len(tokens) - 1):
        model.decode(Arm.GENERATION, tokens[position], position)
    model.flush()
    model.extend(Arm.SCORING, tokens, 0, Phase.EXTEND)
    return model.divergent_tokens(prompt, len(tokens))
