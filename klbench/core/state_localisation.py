"""Where a divergence is born as far as the state alone tells: layer and position, no operator.

For traces of back end "state": no operator was watched, so the server may replay CUDA graphs; the K/V rows
and recurrent slots were looked at between its forwards. Three answers are told apart at each layer and row:

- restore: what was read is not what was last written to that slot, within one arm (provenance.py);
- write: the row wrote other bits than the cold recomputation, in K or in V alone: both are made from one
  hidden row, so that row most likely is equal, and what lies behind it is not;
- arithmetic: K and V differ together though every layer below read equal state. It is born between the state
  of the layer below, which was read, and this layer's, which was written.

A row whose state differs nowhere though its token's logprob does is spoilt behind the last state. A
difference at a row that read other state in a layer below is inherited. Rows are paired by token and
position; there is no embedding to prove it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klbench.core.alignment import Alignment
from klbench.core.comparison import ABSENT, Pairs, Status, Statuses
from klbench.core.findings import Evidence, Finding, Kind, Localisation, Map, Masked, not_aligned
from klbench.core.history import find_sorted, histories
from klbench.core.origins import Mask, scoring_rows
from klbench.core.provenance import wrong_reads
from klbench.core.ranks import as_one, same_rows
from klbench.core.state_rows import StateRows
from klbench.core.surroundings import cells_as_map
from klbench.core.trace import Arm, Ints, Operator, Phase, Slot, Trace

_NOT_WATCHED = Evidence(
    "state_probe",
    "No operator was watched: the state was looked at between forwards, as the server runs.",
    {},
)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The stateful operators of a rank in the order of their layers; arrays are [L, N] over the pairs."""

    operators: tuple[int, ...]
    read: Statuses
    """All that the row may read, its own row included."""
    written: Statuses
    """What the row wrote, all arguments together."""
    halves: tuple[dict[str, Statuses], ...]
    """For each operator by argument: [N] what the row wrote of it."""

    @property
    def below(self) -> Statuses:
        """[L, N] the joint status of what was read in all layers below."""
        result: Statuses = np.full_like(self.read, ABSENT)
        if len(self.read) > 1:
            result[1:] = np.maximum.accumulate(self.read, axis=0)[:-1]
        return result


def localise_state(trace: Trace, alignments: Sequence[Alignment], divergent_positions: Ints) -> Localisation:
    """All origins that the state shows, over all ranks, by position and layer."""
    refused = [
        not_aligned(request=alignment.pairs.request, rank=alignment.pairs.rank, reason=alignment.reason)
        for alignment in alignments
        if not alignment.proved
    ]
    ranks = [_Rank(trace, alignment, divergent_positions) for alignment in alignments if alignment.proved]
    for rank in ranks:
        rank.see([other for other in ranks if other is not rank])
    made = [(rank, rank.findings()) for rank in ranks]
    found = [(rank.key(finding), finding) for rank, mine in made for finding in mine]
    found.sort(key=lambda entry: entry[0])
    findings = (*refused, *as_one([finding for _, finding in found]))
    first = found[0][1] if found else None
    masked = [entry for rank, mine in made if first for entry in rank.masked(mine or [first])]
    return Localisation(
        findings=findings,
        masked=tuple(masked),
        around=(),
        map=next((rank.map(mine) for rank, mine in made if first in mine), None),
        around_position=first.first_position if first is not None else None,
        around_arm=first.arm if first is not None else None,
    )


class _Rank:
    """One rank's state, compared."""

    def __init__(self, trace: Trace, alignment: Alignment, divergent_positions: Ints) -> None:
        self._trace = trace
        self._pairs = pairs = alignment.pairs
        self._divergent = scoring_rows(pairs, divergent_positions)
        self._seen = _look(trace, alignment)
        self._below = self._seen.below
        self._read = self._seen.read.max(axis=0, initial=ABSENT)

    def see(self, others: Sequence[_Rank]) -> None:
        """A layer's state is made of what all ranks put into the layers below: theirs counts here, too."""
        for other in others:
            if other._seen.operators != self._seen.operators:
                continue
            rows = same_rows(self._pairs, other._pairs)
            mine = np.flatnonzero(rows >= 0)
            theirs = rows[mine]
            self._below[:, mine] = np.maximum(self._below[:, mine], other._seen.below[:, theirs])
            read = other._seen.read.max(axis=0, initial=ABSENT)
            self._read[mine] = np.maximum(self._read[mine], read[theirs])

    def key(self, finding: Finding) -> tuple[bool, int, int, int]:
        place = self._seen.operators.index(finding.operator) if finding.operator >= 0 else 0
        return finding.latent, finding.first_position, place, finding.rank

    def findings(self) -> list[Finding]:
        every = np.ones(len(self._pairs), dtype=np.bool_)
        found = [
            self._restored(number, state, rows)
            for number in self._seen.operators
            for state, rows in wrong_reads(self._trace, self._pairs, number, every)
        ]
        found += self._born()
        behind = self._behind()
        found += [finding for finding in behind if "not_observed" not in finding.kinds]
        return found or self._unknown_writer() or behind

    def _restored(self, number: int, state: StateRows, rows: Mask) -> Finding:
        fact = Evidence("state_restore", state.sentence(), state.as_dict())
        return self._finding(("state_restore",), number, _layer(self._trace.operators[number]), rows, fact)

    def _born(self) -> list[Finding]:
        """Rows that wrote other state than the cold recomputation though all below them is equal."""
        found: list[Finding] = []
        born = (self._seen.written == Status.DIFFERS) & (self._below != Status.DIFFERS)
        for place, number in enumerate(self._seen.operators):
            halves = self._seen.halves[place]
            differing = sum((status == Status.DIFFERS).astype(np.int64) for status in halves.values())
            for part in self._by_arm(born[place]):
                # Bits may agree by chance: one row that differs in all halves speaks for the others.
                alone = len(halves) > 1 and not (part & (differing == len(halves))).any()
                found.append(self._written(place, number, part, halves, alone))
        return found

    def _written(
        self, place: int, number: int, rows: Mask, halves: dict[str, Statuses], alone: bool
    ) -> Finding:
        layer = _layer(self._trace.operators[number])
        node = self._first(rows)
        position = int(self._pairs.position[node])
        names = [name for name, status in halves.items() if status[node] == Status.DIFFERS]
        equal = [name for name in halves if name not in names]
        below = _layer(self._trace.operators[self._seen.operators[place - 1]]) if place else "the embedding"
        text = (
            f"What {layer} wrote at position {position} ({_halves(names)}{self._slots(number, node)}) is not "
            f"what the cold recomputation wrote"
        )
        unseen = self._below[place, node] == Status.UNOBSERVED
        text += (
            "; not all state that layers below read there was observed"
            if unseen
            else "; every layer below read equal state there"
        )
        text += f". It is born between {below} and {layer}."
        kinds: tuple[Kind, ...] = ("operator", "gap", "state_write")
        module = f"{below} -> {layer}"
        if alone:
            kinds, module = ("state_write", "operator", "gap"), layer
            text += (
                f" Its {_halves(equal)} is bit-equal and made from the same hidden row: what follows "
                "that row is wrong, most likely the write."
            )
        if unseen:
            kinds = (*kinds, "not_observed")
        values = {"position": position, "arguments": names, "below": below, "layer": layer}
        return self._finding(kinds, number, module, rows, Evidence("state_differs", text, values))

    def _slots(self, number: int, node: int) -> str:
        """`, pool slot 412` of what the row wrote, nothing where that was not seen."""
        trace, pairs = self._trace, self._pairs
        forward = trace.row_forward[pairs.decode_row[node]]
        mine = (trace.slot_operator == number) & (trace.slot_forward == forward)
        mine &= (trace.slot_position == pairs.position[node]) & (trace.slot_kind == Slot.WRITTEN)
        slots = trace.slot_pool[mine & (trace.slot_request == pairs.request)]
        return f", pool slot {slots[0]}" if len(slots) else ""

    def _behind(self) -> list[Finding]:
        """Divergent rows all of whose state is equal: spoilt behind the last state."""
        if not self._seen.operators:
            return []
        read = self._read
        rows = self._divergent & (read >= Status.EQUAL) & (read != Status.DIFFERS)
        unseen = bool((rows & (read == Status.UNOBSERVED)).any())
        number = self._seen.operators[-1]
        layer = _layer(self._trace.operators[number])
        equal = "All state that the row read is bit-equal in every layer"
        if unseen:
            equal = "No state that the row read was seen to differ, but not all was observed in both arms"
        text = (
            f"{equal}; the logprob is not equal. It is born behind the state of {layer}, the last: in its "
            "attention, what follows it, or the head."
        )
        kinds: tuple[Kind, ...] = ("operator", "gap", "head")
        return [
            self._finding(
                (*kinds, "not_observed") if unseen else kinds,
                number,
                f"{layer} -> logprob",
                part,
                Evidence("behind_the_state", text, {"layer": layer}),
            )
            for part in self._by_arm(rows)
        ]

    def _unknown_writer(self) -> list[Finding]:
        """State that differs where nobody was seen to write it: another request's rows."""
        differs = (self._seen.read == Status.DIFFERS) & (self._below != Status.DIFFERS)
        found = []
        for place, number in enumerate(self._seen.operators):
            layer = _layer(self._trace.operators[number])
            text = (
                f"The state that {layer} reads is not that of the cold recomputation, and the forward that "
                "wrote it was not looked at: another request may have."
            )
            for part in self._by_arm(differs[place]):
                kinds: tuple[Kind, ...] = ("not_observed", "state_restore", "state_write", "operator", "gap")
                found.append(self._finding(kinds, number, layer, part, Evidence("writer_unknown", text, {})))
        return found[:1]

    def _first(self, rows: Mask) -> int:
        """Of the rows the one at the earliest position, and of several there the first in time."""
        nodes = np.flatnonzero(rows)
        return int(nodes[np.argmin(self._pairs.position[nodes])])

    def _by_arm(self, rows: Mask) -> list[Mask]:
        parts = [rows & (self._pairs.arm == arm) for arm in np.unique(self._pairs.arm)]
        return [part for part in parts if part.any()]

    def _finding(
        self, kinds: tuple[Kind, ...], number: int, module: str, rows: Mask, fact: Evidence
    ) -> Finding:
        pairs = self._pairs
        nodes, node = np.flatnonzero(rows), self._first(rows)
        latent = not self._divergent[nodes[0] :].any()
        evidence = [fact, _NOT_WATCHED]
        if latent:
            evidence.append(Evidence("latent", "No divergent token comes after it.", {}))
        return Finding(
            kinds=kinds,
            module=module,
            call=0,
            operator=number,
            layer=self._trace.operators[number].layer,
            request=pairs.request,
            arm=Arm(int(pairs.arm[node])).name.lower(),
            rank=pairs.rank,
            phase=Phase(int(pairs.phase[node])).name.lower(),
            first_position=int(pairs.position[node]),
            count=len(np.unique(pairs.position[nodes])),
            grade="unknown" if "not_observed" in kinds else "probable",
            latent=latent,
            evidence=tuple(evidence),
        )

    def masked(self, findings: Sequence[Finding]) -> list[Masked]:
        """Layers that in some phase never stood above equal state, because of the first of `findings`."""
        because = min(findings, key=self.key).module
        found = []
        for place, number in enumerate(self._seen.operators):
            operator = self._trace.operators[number]
            for phase in Phase:
                rows = self._pairs.phase == phase
                if rows.any() and (self._below[place, rows] == Status.DIFFERS).all():
                    found.append(
                        Masked(
                            module=_layer(operator),
                            call=0,
                            layer=operator.layer,
                            rank=self._pairs.rank,
                            phase=phase.name.lower(),
                            first_position=int(self._pairs.position[rows].min()),
                            rows=int(rows.sum()),
                            because=because,
                        )
                    )
        return found

    def map(self, findings: Sequence[Finding]) -> Map:
        """Layers by rows; the head's line says where a logprob differs."""
        seen = self._seen
        cells = np.where(seen.read == Status.EQUAL, 0, np.where(seen.read == Status.DIFFERS, 1, -1))
        cells[seen.written == Status.DIFFERS] = 2
        head = np.where(self._pairs.arm == Arm.GENERATION, 0, ABSENT)
        head[self._divergent] = 2
        grid = np.concatenate([cells, head[None]]).astype(np.int8)
        for finding in findings:
            arm = Arm[finding.arm.upper()]
            here = (self._pairs.position == finding.first_position) & (self._pairs.arm == arm)
            behind = "head" in finding.kinds
            grid[-1 if behind else seen.operators.index(finding.operator), here] = 3
        names = [self._trace.operators[number] for number in seen.operators]
        labels = [str(op.layer) if op.layer is not None else op.module for op in names]
        return cells_as_map(tuple(labels), self._pairs, grid)


def _layer(operator: Operator) -> str:
    """The path of the layer that a stateful operator belongs to; its own where it lies in none."""
    parts = operator.module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit() and str(operator.layer) == part:
            return ".".join(parts[: place + 1])
    return operator.module


def _halves(arguments: Sequence[str]) -> str:
    """`K and V`; a recurrent state by its name."""
    return " and ".join(name.upper() if name in ("k", "v") else name for name in arguments)


def _look(trace: Trace, alignment: Alignment) -> _Seen:
    pairs = alignment.pairs
    read = {
        number: history.status for number, history in histories(trace, pairs, alignment.comparison).items()
    }
    nothing = np.zeros((0, len(pairs)), dtype=np.int8)
    halves = tuple(_own_rows(trace, pairs, number) for number in read)
    absent = np.full(len(pairs), ABSENT, dtype=np.int8)
    written = [np.maximum.reduce([absent, *part.values()]) for part in halves]
    return _Seen(
        operators=tuple(read),
        read=np.stack(list(read.values())) if read else nothing,
        written=np.stack(written) if written else nothing,
        halves=halves,
    )


def _own_rows(trace: Trace, pairs: Pairs, operator: int) -> dict[str, Statuses]:
    """[N] by argument: whether a row's own write to this operator's state is the same in both arms."""
    mine = np.flatnonzero(
        (trace.slot_operator == operator)
        & (trace.slot_kind == Slot.WRITTEN)
        & (trace.slot_request == pairs.request)
    )
    span = int(pairs.position.max(initial=0)) + 1
    result: dict[str, Statuses] = {}
    for argument in np.unique(trace.slot_argument[mine]).tolist():
        own = mine[(trace.slot_argument[mine] == argument) & (trace.slot_position[mine] < span)]
        place = trace.slot_forward[own] * span + trace.slot_position[own]
        order = np.argsort(place, kind="stable")
        place, own = place[order], own[order]
        here, there = (
            find_sorted(place, trace.row_forward[rows] * span + pairs.position)
            for rows in (pairs.decode_row, pairs.scoring_row)
        )
        both = (here >= 0) & (there >= 0)
        status = np.full(len(pairs), ABSENT, dtype=np.int8)
        status[(here >= 0) != (there >= 0)] = Status.UNOBSERVED
        same = (trace.slot_digest[own[here[both]]] == trace.slot_digest[own[there[both]]]).all(axis=1)
        status[both] = np.where(same, Status.EQUAL, Status.DIFFERS)
        result[trace.arguments[argument]] = status
    return result
