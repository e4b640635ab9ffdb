"""Two passes of one helper side by side: do their bits agree, and if not, does the divergence move?

Invariants: logprobs are compared per token, as float32 bits, and only up to where both passes generated the
same tokens, but for a token whose logprob either pass lost; other bits in batches that were not put together
alike are never called a difference, and where a divergence comes or goes with such batches the outcome says
so; the bound on a race says how often it would have been missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klbench.core.columns import HelperColumns, compared_in_both
from klbench.core.experiments import (
    CATALOGUE,
    DIFFERS,
    MOVED,
    NO_EFFECT,
    NOT_COMPARABLE,
    SAME,
    VANISHED,
)
from klbench.core.kl import summarise
from klbench.core.text import counted

_MISSED = 0.05
"""The bound on a flip rate holds with 95 % confidence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one experiment found: `outcome` is one of the experiment's, `text` says it with its numbers."""

    name: str
    outcome: str
    text: str
    values: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "outcome": self.outcome, "text": self.text, "values": dict(self.values)}


@dataclass(frozen=True, slots=True)
class PassDifference:
    """How pass B differs from pass A over `tokens` shared tokens. `first`: (request, offset) of the first
    difference in either arm. `shortened` requests generated other tokens from somewhere on."""

    tokens: int
    decode: int
    prefill: int
    shortened: int
    first: tuple[int, int] | None

    @property
    def equal(self) -> bool:
        return not (self.decode or self.prefill or self.shortened)


def compare_passes(a: HelperColumns, b: HelperColumns) -> PassDifference:
    """Compares the two arms of each request bit for bit. The passes must have the same requests."""
    a, b = compared_in_both(a, b)
    tokens = decode = prefill = shortened = 0
    first: tuple[int, int] | None = None
    compared = a.compared
    bits = [(part.decode_nats.view(np.uint32), part.prefill_nats.view(np.uint32)) for part in (a, b)]
    for request in range(min(a.requests, b.requests)):
        one, other = a.tokens_of(request), b.tokens_of(request)
        count = min(one.stop - one.start, other.stop - other.start)
        same_ids = a.token_id[one][:count] == b.token_id[other][:count]
        # The token at which two generations part is the last whose logprobs speak of the same context.
        shared = count if bool(same_ids.all()) else int((~same_ids).argmax())
        lengths_differ = one.stop - one.start != other.stop - other.start
        shortened += int(shared < count or lengths_differ)
        kept = compared[one][:shared]
        decode_differs = (bits[0][0][one][:shared] != bits[1][0][other][:shared]) & kept
        # A scoring arm scores the tokens of its own pass: later ones do not change earlier scores.
        prefill_differs = (bits[0][1][one][:shared] != bits[1][1][other][:shared]) & kept
        either = decode_differs | prefill_differs
        tokens += int(np.count_nonzero(kept))
        decode += int(np.count_nonzero(decode_differs))
        prefill += int(np.count_nonzero(prefill_differs))
        if first is None and (bool(either.any()) or shared < count):
            first = request, int(either.argmax()) if bool(either.any()) else shared
    return PassDifference(tokens, decode, prefill, shortened, first)


def same_prompts(a: HelperColumns, b: HelperColumns) -> bool:
    """Whether both passes asked the same, request by request, with the same cached tokens."""
    return (
        a.helper == b.helper
        and np.array_equal(a.prompt_start, b.prompt_start)
        and np.array_equal(a.prompt_ids, b.prompt_ids)
        and np.array_equal(a.cached_generation, b.cached_generation)
        and np.array_equal(a.cached_scoring, b.cached_scoring)
    )


def flip_rate_bound(repeats: int) -> float:
    """The largest rate, per pass, of a race that `repeats` equal passes leave possible at 95 %.

    A race of rate p stays unseen in R passes with probability (1 - p)^R; that is 5 % at p = 1 - 0.05^(1/R).
    """
    return float(1.0 - _MISSED ** (1.0 / repeats)) if repeats > 0 else 1.0


def read_repeats(
    base: HelperColumns, again: Sequence[HelperColumns], composed_equally: Sequence[bool]
) -> Outcome:
    """The outcome of `repeats`: `composed_equally[i]` says whether pass i had the batches of the base."""
    comparable = [
        part
        for part, equally in zip(again, composed_equally, strict=True)
        if equally and same_prompts(base, part)
    ]
    values: dict[str, Any] = {"passes": len(again), "compared": len(comparable)}
    if not comparable:
        text = "no two runs had the same batches, so no bits were compared"
        return Outcome("repeats", NOT_COMPARABLE, text, values)
    differences = [compare_passes(base, part) for part in comparable]
    moved = sum(not difference.equal for difference in differences)
    values["differing"] = moved
    if moved:
        worst = max(differences, key=lambda d: (d.decode + d.prefill, d.shortened))
        values |= {"decode_tokens": worst.decode, "prefill_tokens": worst.prefill}
        values["first"] = list(worst.first) if worst.first is not None else None
        text = (
            f"{moved} of {len(comparable)} repeats with equal batches gave other bits: {worst.decode} "
            "decode and "
            f"{worst.prefill} prefill logprobs of {worst.tokens} tokens"
        )
        return Outcome("repeats", DIFFERS, text, values)
    bound = flip_rate_bound(len(comparable))
    values["flip_rate_below"] = bound
    text = (
        f"{len(comparable)} repeats with equal batches are bit-identical; a race of more than {bound:.0%} "
        "a run "
        "is excluded (95 %), a rarer one is not"
    )
    return Outcome("repeats", SAME, text, values)


def read_toggle(
    name: str,
    base: HelperColumns,
    changed: HelperColumns,
    *,
    setting: str,
    asked: Mapping[str, Any],
    in_force: Mapping[str, Any],
    composed_equally: bool,
) -> Outcome:
    """The outcome of a change that should not matter: `asked` against what the server says is `in_force`."""
    values: dict[str, Any] = {"setting": setting, "asked": dict(asked), "composed_equally": composed_equally}
    ignored = {key: in_force.get(key) for key, value in asked.items() if in_force.get(key) != value}
    if ignored:
        values["in_force"] = ignored
        said = ", ".join(f"{key} is {value!r}" for key, value in ignored.items())
        return Outcome(name, NO_EFFECT, f"{setting} did not take effect: {said}", values)
    otherwise = "" if composed_equally else ", in batches put together otherwise"
    before, after = map(summarise, compared_in_both(base, changed))
    dirty_before, dirty_after = before.divergent_tokens > 0, after.divergent_tokens > 0
    values |= {"divergent_before": int(dirty_before.sum()), "divergent_after": int(dirty_after.sum())}
    if dirty_before.any() and not dirty_after.any():
        if not after.tokens:
            return Outcome(name, NOT_COMPARABLE, f"with {setting} nothing could be compared", values)
        return Outcome(name, VANISHED, f"with {setting} nothing diverges{otherwise}", values)
    same_requests = np.array_equal(dirty_before, dirty_after)
    if same_requests and np.array_equal(before.first_offset, after.first_offset):
        difference = compare_passes(base, changed)
        values |= {"decode_tokens": difference.decode, "prefill_tokens": difference.prefill}
        if composed_equally and same_prompts(base, changed) and difference.equal:
            return Outcome(name, SAME, f"with {setting} every logprob has the same bits", values)
        if difference.equal:
            text = f"with {setting} every logprob has the same bits, in batches put together otherwise"
            return Outcome(name, SAME, text, values)
        if not composed_equally:
            text = (
                f"with {setting} the same requests diverge from the same tokens on; the bits differ, but "
                "so did "
                "the batches"
            )
            return Outcome(name, NOT_COMPARABLE, text, values)
        text = f"with {setting} the same requests diverge, with other bits in equal batches"
        return Outcome(name, DIFFERS, text, values)
    if not dirty_before.any():
        diverge = counted(int(dirty_after.sum()), "request diverges", "requests diverge")
        text = f"with {setting} {diverge}, otherwise none{otherwise}"
        return Outcome(name, MOVED, text, values)
    divergent = counted(int(dirty_before.sum()), "divergent request")
    text = (
        f"with {setting} the divergence moves: {divergent} before, {int(dirty_after.sum())} after, "
        f"{int((dirty_before & dirty_after).sum())} of them the same{otherwise}"
    )
    return Outcome(name, MOVED, text, values)


def read_alone(base: HelperColumns, request: int, alone: HelperColumns) -> Outcome:
    """The outcome of `alone`: `alone` holds the one request of `base` that was sent by itself."""
    values: dict[str, Any] = {"request": request, "helper": base.helper}
    whole = chosen(base, [request])
    if not np.array_equal(whole.prompt_ids, alone.prompt_ids) or not len(alone.token_id):
        text = f"request {request} alone got another prompt or was dropped, so nothing was compared"
        return Outcome("alone", NOT_COMPARABLE, text, values)
    before, after = map(summarise, compared_in_both(whole, alone))
    if summarise(whole).divergent and not before.divergent:
        text = f"the only token of request {request} that diverges has no logprob alone: the server lost it"
        return Outcome("alone", NOT_COMPARABLE, text, values)
    values["divergent_tokens"] = after.divergent
    if not after.divergent:
        return Outcome("alone", VANISHED, f"alone request {request} does not diverge", values)
    difference = compare_passes(whole, alone)
    values |= {"decode_tokens": difference.decode, "prefill_tokens": difference.prefill}
    if difference.equal:
        return Outcome("alone", SAME, f"alone request {request} diverges with the same bits", values)
    text = (
        f"alone request {request} diverges at {counted(after.divergent, 'token')}, with other bits than in "
        f"its batch ({difference.decode} decode and {difference.prefill} prefill logprobs of "
        f"{difference.tokens})"
    )
    return Outcome("alone", DIFFERS, text, values)


def read_wide_restore(base: HelperColumns, wide: HelperColumns) -> Outcome:
    """The outcome of `wide_restore`: the requests of `base` with a longer prompt behind the same prefix.

    Only requests that restored exactly as many tokens as before are judged: a restore may be wrong at some
    lengths alone.
    """
    before, after = map(summarise, compared_in_both(base, wide))
    hits = (wide.cached_generation > 0) & ~wide.dropped & (wide.cached_generation == base.cached_generation)
    rows = (wide.prompt_len - wide.cached_generation)[hits]
    dirty = before.divergent_tokens > 0
    still = int(np.count_nonzero((after.divergent_tokens > 0) & hits & dirty))
    values: dict[str, Any] = {
        "hits": int(np.count_nonzero(hits)),
        "divergent_before": int(np.count_nonzero(dirty)),
        "divergent_after": still,
        "extend_rows": [int(rows.min()), int(rows.max())] if len(rows) else None,
    }
    if not dirty.any() or not (hits & dirty).any():
        text = "no divergent request restored the same prefix again, so nothing was compared"
        return Outcome("wide_restore", NOT_COMPARABLE, text, values)
    least, most = rows.min(), rows.max()
    said = (
        f"with extends of {counted(int(least), 'row')}"
        if least == most
        else f"with extends of {least} to {most} rows"
    )
    if still:
        text = f"{said}, {still} of {values['divergent_before']} divergent hits still diverge"
        return Outcome("wide_restore", DIFFERS, text, values)
    return Outcome("wide_restore", VANISHED, f"{said}, no hit that diverged before diverges", values)


@dataclass(frozen=True, slots=True)
class EqualRows:
    """One token as decode and as a one-token extend: its bits in both, and the rows of either forward."""

    request: int
    offset: int
    same_token: bool
    same_bits: bool
    decode_rows: int | None
    extend_rows: int | None
    """None where the forward was not observed."""
    cached_right: bool
    """The extend had one row: all but its last token came from the cache."""

    @property
    def comparable(self) -> bool:
        return self.cached_right and self.decode_rows is not None and self.decode_rows == self.extend_rows


def read_equal_m(pairs: Sequence[EqualRows]) -> Outcome:
    """The outcome of `equal_m`, from pairs whose forwards are proved to have as many rows."""
    usable = [pair for pair in pairs if pair.comparable]
    values: dict[str, Any] = {"pairs": len(pairs), "compared": len(usable)}
    if not usable:
        uncached = sum(not pair.cached_right for pair in pairs)
        why = "of other row counts, or not observed"
        if uncached:
            why = f"not of one row: {uncached} of {len(pairs)} extends computed more than their last token"
        return Outcome("equal_m", NOT_COMPARABLE, f"the forwards were {why}", values)
    differing = [pair for pair in usable if not (pair.same_bits and pair.same_token)]
    rows = sorted({pair.decode_rows for pair in usable if pair.decode_rows is not None})
    values |= {"differing": len(differing), "rows": rows}
    said = f"{counted(len(usable), 'token')} as decode and as a one-token extend, both with {_numbers(rows)} "
    said += "row" if rows == [1] else "rows"
    if differing:
        return Outcome("equal_m", DIFFERS, f"{said}: {len(differing)} differ", values)
    return Outcome("equal_m", SAME, f"{said}: all have the same bits", values)


def _numbers(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def chosen(columns: HelperColumns, requests: Sequence[int]) -> HelperColumns:
    """The columns of some requests alone, in the given order."""
    index = np.array(requests, dtype=np.int64)
    tokens = [np.arange(columns.start[i], columns.start[i + 1]) for i in requests]
    prompts = [np.arange(columns.prompt_start[i], columns.prompt_start[i + 1]) for i in requests]
    token, prompt = np.concatenate(tokens), np.concatenate(prompts)
    return HelperColumns(
        helper=columns.helper,
        prompt_len=columns.prompt_len[index],
        cached_generation=columns.cached_generation[index],
        cached_scoring=columns.cached_scoring[index],
        output_len=columns.output_len[index],
        dropped=columns.dropped[index],
        start=np.concatenate([[0], np.cumsum([len(part) for part in tokens])]).astype(np.int64),
        token_id=columns.token_id[token],
        decode_nats=columns.decode_nats[token],
        prefill_nats=columns.prefill_nats[token],
        prompt_start=np.concatenate([[0], np.cumsum([len(part) for part in prompts])]).astype(np.int64),
        prompt_ids=columns.prompt_ids[prompt],
        lost=columns.lost[index],
    )


def meaning(outcome: Outcome) -> str:
    """What an outcome means for the divergence."""
    if outcome.outcome == NO_EFFECT:
        return "a flag that changes nothing: nothing was tested until it takes effect"
    known = CATALOGUE[outcome.name].outcomes if outcome.name in CATALOGUE else {}
    said = known.get(outcome.outcome, "it decides nothing by itself")
    if outcome.outcome in (VANISHED, MOVED) and outcome.values.get("composed_equally") is False:
        said += "; or the row counts of the batches, which changed with it"
    return said
