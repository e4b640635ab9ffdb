"""Where a divergence is born: all origins of one aligned trace, and what they hide.

An origin is a point (row position, operator) whose visible inputs and state read are identical in both arms
and whose output differs. Rules, at each row:

- innermost calls: a leaf whose inputs are equal and whose output differs is an origin, wherever it stands;
- a gap A -> B: the row's first difference is an input (of B), all that was put out before it (last by A) is
  equal; a container whose output is the row's first difference is the gap behind its last child;
- a stateful operator also needs an equal history (history.py): a difference there is inherited;
- the head: the hidden rows entering the logits are equal and the logprob differs;
- several ranks: what another rank explains is inherited from it (ranks.py).

What is missing in one arm is never equal. Nothing here knows a tensor or a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from klbench.core.alignment import Alignment
from klbench.core.beside_state import beside_state
from klbench.core.comparison import ABSENT, Status
from klbench.core.cone import Cone, masked_operators
from klbench.core.experts import experts_chosen, with_experts
from klbench.core.findings import Evidence, Finding, Grade, Kind, Localisation, Masked, not_aligned
from klbench.core.history import History, histories
from klbench.core.origins import Judged, Mask, Origin, compared_rows, gaps, head, judge, leaf_origins
from klbench.core.provenance import state_origins
from klbench.core.ranks import as_one, beside, inherited, open_to_others
from klbench.core.surroundings import layer_map, neighbours
from klbench.core.trace import METADATA, Arm, Direction, Ints, Operator, Phase, Trace


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's trace, compared and judged."""

    trace: Trace
    alignment: Alignment
    judged: Judged
    history: dict[int, History]
    origins: list[Origin] = field(default_factory=list)
    inherited: list[tuple[int, Mask]] = field(default_factory=list)
    """Operators and the rows at which another rank explains what they put out."""

    @classmethod
    def of(cls, trace: Trace, alignment: Alignment) -> _Rank:
        pairs, comparison = alignment.pairs, alignment.comparison
        return cls(trace, alignment, judge(trace, comparison), histories(trace, pairs, comparison))

    def find_origins(self, divergent_positions: Ints, first_token: int, others: Sequence[_Rank]) -> None:
        """Fills `origins`, and `inherited` where another rank explains a leaf's output."""
        trace, pairs, comparison = self.trace, self.alignment.pairs, self.alignment.comparison
        compared = compared_rows(pairs, first_token)
        candidates = [
            *leaf_origins(trace, comparison, self.judged, self.history, compared),
            *gaps(trace, comparison, compared),
            *head(trace, pairs, comparison, divergent_positions),
        ]
        self.origins = state_origins(trace, pairs, comparison, self.judged, self.history)
        candidates = beside_state(
            trace, pairs, comparison, self.judged, self.history, candidates, self.origins
        )
        mine = (pairs, comparison)
        seen = [beside(mine, (other.alignment.pairs, other.alignment.comparison)) for other in others]
        for origin in candidates:
            taken = inherited(trace, comparison, origin, seen)
            if taken.any() and origin.kind != "gap":
                self.inherited.append((origin.operator, taken))
            rest = dataclasses.replace(origin, rows=origin.rows & ~taken)
            if rest.rows.any():
                self.origins.append(rest)

    def masked(self, earliest: _Described) -> list[Masked]:
        """What never saw equal inputs on this rank, because of its own first origin or the first of all."""
        module = self.trace.operators[earliest.origin.operator].module
        if self.origins:
            own = min(self.origins, key=lambda origin: (int(np.flatnonzero(origin.rows)[0]), origin.column))
            module = self.trace.operators[own.operator].module
        inputs = self.judged.inputs.copy()
        for operator, rows in self.inherited:
            # Another rank's were not equal.
            inputs[operator, rows] = Status.DIFFERS
        judged = dataclasses.replace(self.judged, inputs=inputs)
        return masked_operators(self.trace, self.alignment.pairs, judged, self.history, module)


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    """A finding with what it was made from; sorted by what matters, then by place and time."""

    of: _Rank
    finding: Finding
    origin: Origin
    node: int

    @property
    def key(self) -> tuple[bool, int, int, int]:
        return (self.finding.latent, self.finding.first_position, self.origin.column, self.finding.rank)


def localise(
    trace: Trace, alignments: list[Alignment], divergent_positions: Ints, first_token: int = 1
) -> Localisation:
    """All origins over all ranks: those that reach a divergent token first, by position and execution order.

    `divergent_positions` are the absolute positions of the request's tokens whose two logprobs are not
    bit-equal; the row that scores the token at t is t - 1. `first_token` is the position of the first token
    whose logprobs were compared: what the head makes of earlier rows (the ends of a prompt's chunks, a
    warming arm) nobody uses, and it is no origin.
    """
    refused = [
        not_aligned(
            request=alignment.pairs.request,
            rank=alignment.pairs.rank,
            reason=alignment.reason,
        )
        for alignment in alignments
        if not alignment.proved
    ]
    ranks = [_Rank.of(trace, alignment) for alignment in alignments if alignment.proved]
    for rank in ranks:
        rank.find_origins(divergent_positions, first_token, [other for other in ranks if other is not rank])
    described: list[_Described] = []
    experts: Evidence | None = None
    for rank in ranks:
        pairs, comparison = rank.alignment.pairs, rank.alignment.comparison
        cone = Cone(trace, pairs, comparison, rank.history, divergent_positions)
        described += [
            _describe(rank, part, cone) for origin in rank.origins for part in _by_arm(rank, origin)
        ]
        experts = experts or experts_chosen(trace, pairs, comparison)
    if not described:
        return Localisation(tuple(refused), (), (), None, None, None)
    described.sort(key=lambda entry: entry.key)
    blind = [finding.rank for finding in refused]
    findings = as_one([open_to_others(entry.finding, blind) for entry in described])
    first = described[0]
    rank = first.of
    pairs, comparison = rank.alignment.pairs, rank.alignment.comparison
    return Localisation(
        findings=(*refused, *with_experts(findings, experts)),
        masked=tuple(entry for rank in ranks for entry in rank.masked(first)),
        around=neighbours(trace, comparison, rank.judged, rank.history, first.origin, first.node),
        map=layer_map(trace, pairs, comparison, rank.history, rank.origins, divergent_positions),
        around_position=int(pairs.position[first.node]),
        around_arm=_arm(rank, first.node),
        around_phase=first.finding.phase,
        around_rank=pairs.rank,
    )


def _by_arm(rank: _Rank, origin: Origin) -> list[Origin]:
    """The origin split into its rows of the warming arm and those of the generation arm."""
    arms = rank.alignment.pairs.arm
    parts = [dataclasses.replace(origin, rows=origin.rows & (arms == arm)) for arm in np.unique(arms)]
    return [part for part in parts if part.rows.any()]


def _arm(rank: _Rank, node: int) -> str:
    return Arm(int(rank.alignment.pairs.arm[node])).name.lower()


def _describe(rank: _Rank, origin: Origin, cone: Cone) -> _Described:
    trace, pairs = rank.trace, rank.alignment.pairs
    rows = np.flatnonzero(origin.rows)
    # The earliest position, and of several rows there the first in time.
    node = int(rows[np.argmin(pairs.position[rows])])
    operator = trace.operators[origin.operator]
    before = trace.operators[origin.before].module if origin.before is not None else "the start"
    module = f"{before} -> {operator.module}" if origin.kind == "gap" else operator.module
    kinds, evidence = _kinds(rank, origin, node)
    grade: Grade = "unknown" if "not_observed" in kinds else "probable"
    if _beyond_back_end(trace, operator, kinds):
        kinds = (*kinds, "not_observed")
    latent = not cone.reaches(origin)
    if latent:
        evidence.append(Evidence("latent", "Its difference reaches no token whose logprob differs.", {}))
    finding = Finding(
        kinds=kinds,
        module=module,
        call=operator.call,
        operator=origin.operator,
        layer=operator.layer,
        request=pairs.request,
        arm=_arm(rank, node),
        rank=pairs.rank,
        phase=Phase(int(pairs.phase[node])).name.lower(),
        first_position=int(pairs.position[node]),
        count=len(np.unique(pairs.position[rows])),
        grade=grade,
        latent=latent,
        evidence=tuple(evidence),
    )
    return _Described(rank, finding, origin, node)


def _beyond_back_end(trace: Trace, operator: Operator, kinds: tuple[Kind, ...]) -> bool:
    """Whether the back end never sees what would settle the kind: the state as read, the head's operators.

    It leaves the kind open and the grade probable, where a gap in what it does see makes it unknown.
    """
    unseen_state = operator.state is not None and not trace.observes_state and kinds[0] != "gap"
    unseen_head = kinds[0] == "head" and not trace.observes_head
    return "not_observed" not in kinds and (unseen_state or unseen_head)


def _kinds(rank: _Rank, origin: Origin, node: int) -> tuple[tuple[Kind, ...], list[Evidence]]:
    """All kinds that remain for an origin, the likeliest first, and why."""
    position = int(rank.alignment.pairs.position[node])
    facts = [_born(rank, origin, node)]
    if origin.unseen is not None:
        module = rank.trace.operators[origin.unseen].module
        text = f"{module} reads state and was not called as a module here: it may lie in this gap."
        facts.append(Evidence("state_beside_not_observed", text, {"module": module}))
        return ("gap", "operator", "state_restore", "state_write", "not_observed"), facts
    if origin.kind == "operator" and origin.operator in rank.history:
        kinds, more = _state_kinds(rank, origin, node)
        return kinds, facts + more
    if origin.kind == "operator":
        partly = _partly_observed(rank, origin, node)
        return (("operator", "not_observed") if partly else ("operator",)), facts + partly
    if origin.kind in ("state_write", "state_restore") and origin.state is not None:
        values = {"position": position, **origin.state.as_dict()}
        # The rows of state first: they are the finding.
        return (origin.kind,), [Evidence(origin.kind, origin.state.sentence(), values), *facts]
    if origin.kind == "not_observed" and origin.state is not None:
        values = {"position": position, **origin.state.as_dict()}
        facts.append(Evidence("writer_not_observed", origin.state.unknown(), values))
    if origin.kind == "head" and not rank.trace.observes_head:
        text = "The operators of the head (LM head, log-softmax, sampling) cannot be seen by this back end."
        facts.append(Evidence("head_not_observed", text, {}))
    return (origin.kind,), facts


def _born(rank: _Rank, origin: Origin, node: int) -> Evidence:
    """The fact that makes it an origin."""
    pairs = rank.alignment.pairs
    module = rank.trace.operators[origin.operator].module
    position = int(pairs.position[node])
    values = {"position": position, "rows": int(origin.rows.sum()), "arm": _arm(rank, node)}
    values["batch_rows"] = [
        int(rank.trace.forward_rows[rank.trace.row_forward[row]])
        for row in (pairs.decode_row[node], pairs.scoring_row[node])
    ]
    if origin.kind == "head" and module == "lm_head" and (rows := _head_rows(rank, node)):
        values["head_rows"] = rows
    if origin.kind == "gap":
        text = f"At position {position} all that was put out before {module} is bit-equal, its input is not."
    elif origin.kind == "head":
        text = f"At position {position} the hidden row entering the logits is bit-equal, the logprob is not."
    elif origin.kind == "not_observed":
        text = f"At position {position} the output of {module} differs and its inputs could not be compared."
    else:
        text = (
            f"At position {position} every input of {module} is bit-equal in both arms, its output differs."
        )
    return Evidence("origin", text, values)


def _head_rows(rank: _Rank, node: int) -> list[int]:
    """How many rows the LM head's call had in each of the two arms; nothing where that was not seen."""
    trace, pairs = rank.trace, rank.alignment.pairs
    found = []
    for row in (pairs.decode_row[node], pairs.scoring_row[node]):
        found += [int(rows) for rows in np.unique(trace.head_rows[trace.head_row == row])]
    return found if len(found) == 2 else []


def _partly_observed(rank: _Rank, origin: Origin, node: int) -> list[Evidence]:
    comparison = rank.alignment.comparison
    columns = comparison.columns(origin.operator, Direction.IN)
    missing = columns[comparison.status[columns, node] == Status.UNOBSERVED]
    if not len(missing):
        return []
    names = [rank.trace.arguments[argument] for argument in comparison.argument[missing]]
    text = f"Not observed in both arms: its inputs {', '.join(names)}."
    return [Evidence("inputs_not_observed", text, {"arguments": names})]


def _state_kinds(rank: _Rank, origin: Origin, node: int) -> tuple[tuple[Kind, ...], list[Evidence]]:
    """What remains where a stateful operator's visible inputs are equal and its output differs."""
    trace, pairs = rank.trace, rank.alignment.pairs
    history = rank.history[origin.operator]
    status = int(history.status[node])
    if trace.observes_state and status == Status.EQUAL:
        text = "The state that it read is bit-equal in both arms."
        told = [_told(rank, node)] if trace.operators[origin.operator].state == "kv" else []
        return ("operator",), [Evidence("state_equal", text, {}), *told]
    facts: list[Evidence] = []
    if status == Status.UNOBSERVED:
        facts.append(
            Evidence(
                "history_not_observed",
                "Not all earlier positions that it reads were captured in both arms.",
                {},
            )
        )
    else:
        facts.append(
            Evidence(
                "history_equal",
                "What the state was written from is bit-equal at all earlier positions that it reads; the "
                "state itself cannot be seen by this back end.",
                {},
            )
        )
    restore = bool(history.earlier_forward[node])
    right = _right_before(rank, origin, node)
    if not restore:
        facts.append(
            Evidence(
                "no_earlier_state",
                "In both arms it reads only what this forward wrote: no state was restored.",
                {},
            )
        )
        kinds: tuple[Kind, ...] = ("operator", "state_write")
    elif right is not None and pairs.arm[right] == pairs.arm[node]:
        text = (
            f"In the same arm the row at position {pairs.position[right]} read the earlier state and is "
            "bit-equal: the state was right then."
        )
        facts.append(Evidence("state_was_right", text, {"position": int(pairs.position[right])}))
        kinds = ("operator", "state_restore", "state_write")
    elif pairs.phase[node] == Phase.RESTORED or right is not None:
        text = "It is the first row of this arm that reads the restored prefix."
        if right is not None:
            text += (
                f" When the prefix was computed, the row at position {pairs.position[right]} read it and is "
                "bit-equal."
            )
        facts.append(Evidence("first_read_after_restore", text, {}))
        kinds = ("state_restore", "operator", "state_write")
    else:
        kinds = ("operator", "state_restore", "state_write")
    if status == Status.UNOBSERVED:
        kinds = (*kinds, "not_observed")
    return kinds, facts


def _told(rank: _Rank, node: int) -> Evidence:
    """Whether the attention backend's own metadata was the request's, in both arms."""
    trace, pairs = rank.trace, rank.alignment.pairs
    rows = (int(pairs.decode_row[node]), int(pairs.scoring_row[node]))
    number = trace.arguments.index(METADATA) if METADATA in trace.arguments else -1
    wrong = {}
    for row, arm in zip(rows, (_arm(rank, node), "scoring"), strict=True):
        verdicts = trace.read_digest[(trace.read_row == row) & (trace.read_argument == number)]
        if not len(verdicts):
            text = (
                "What the attention backend was told (lengths, page table) was not observed: it remains a "
                "possible cause."
            )
            return Evidence("metadata_not_observed", text, {})
        if verdict := int(verdicts[0, 0]):
            wrong[arm] = " and ".join(name for bit, name in ((1, "lengths"), (2, "slots")) if verdict & bit)
    if not wrong:
        text = (
            "In both arms the attention backend was told the request's own length, and its own slots if any."
        )
        return Evidence("metadata_right", text, {})
    said = "; ".join(f"in the {arm} arm other {names}" for arm, names in wrong.items())
    text = f"The attention backend was told otherwise than the request is: {said}."
    return Evidence("metadata_wrong", text, wrong)


def _right_before(rank: _Rank, origin: Origin, node: int) -> int | None:
    """The latest row before `node` in time that read state here and is bit-equal, if there is one."""
    inputs, outputs = rank.judged.inputs[origin.operator], rank.judged.outputs[origin.operator]
    history = rank.history[origin.operator].status
    right = (inputs == Status.EQUAL) & (outputs == Status.EQUAL) & (history != ABSENT)
    earlier = np.flatnonzero(right[:node])
    return int(earlier[-1]) if len(earlier) else None
