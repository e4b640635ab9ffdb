"""Explanations that speak of hits: a wrong restore, few rows, the place in the batch.

Each returns a hypothesis, or None where it cannot be meant; what it cannot tell from its rival is said on
both sides.
"""

from __future__ import annotations

from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION, Hypothesis
from klbench.core.residues import Split
from klbench.core.scene import (
    Fact,
    Scene,
    hits_only,
    hits_only_fact,
    is_small,
    residues_of,
    size_fact,
    span,
    splits_of,
)
from klbench.core.text import counted

_MUCH_LARGER = 30.0
"""Hits that differ this many times more than cold requests are not explained by what cold requests show."""
_FEW_ROWS = 64


def wrong_restore(scene: Scene) -> Hypothesis | None:
    """The restored prefix is not what a cold prefill computes."""
    if not scene.hit.dirty:
        return None
    hit, cold = scene.hit, scene.cold
    speaks_for: list[Fact] = []
    against: list[Fact] = []
    grade, weight = "unknown", 20.0 if cold.requests else 46.0
    if hits_only(scene):
        grade, weight = "probable", 60.0
        speaks_for.append(hits_only_fact(scene))
    elif not cold.requests:
        against.append(
            Fact(
                "no_cold_control",
                "no cold request was compared, so the restore is not singled out",
                scene.counts,
            )
        )
    elif cold.median_abs_nats and hit.median_abs_nats >= _MUCH_LARGER * cold.median_abs_nats:
        ratio = hit.median_abs_nats / cold.median_abs_nats
        grade, weight = "probable", 45.0
        speaks_for.append(
            Fact(
                "hits_much_larger",
                f"hits differ {ratio:.0f} times more than cold requests (median {hit.median_abs_nats:.2g} "
                "against "
                f"{cold.median_abs_nats:.2g} nats): what cold requests show does not explain it",
                {"ratio": ratio},
            )
        )
    else:
        against.append(
            Fact(
                "hits_like_cold",
                "hits differ no more than cold requests do; a smaller fault of the restore would be hidden",
                scene.counts,
            )
        )
    if hit.before_decode and grade == "probable":
        weight += 10
        speaks_for.append(
            Fact(
                "before_decode",
                f"in {counted(hit.before_decode, 'hit')} the first generated token, which an extend "
                "computes, already differs: something was wrong before decode began",
                {"requests": hit.before_decode},
            )
        )
    for residue in residues_of(scene):
        if residue.quantity == "cached_tokens" and grade == "probable":
            weight += 10
            speaks_for.append(Fact("residue", residue.sentence, residue.values))
            break
    partial = hit.dirty < hit.requests
    if partial and hits_only(scene):
        weight += 5
        speaks_for.append(
            Fact(
                "some_hits_clean",
                f"{hit.requests - hit.dirty} of {hit.requests} hits are clean, though all of them extend "
                "a restored "
                "prefix",
                scene.counts,
            )
        )
    if hits_only(scene) and hit.readings is not None and hit.readings.offset[0] > 1:
        weight -= 30
        grade = "unknown"
        against.append(
            Fact(
                "late",
                f"no hit diverges before offset {hit.readings.offset[0]}: a wrong restore is there from "
                "the start",
                {"offset": hit.readings.offset[0]},
            )
        )
    if _few_row_split(scene) is not None:
        grade, weight = "unknown", weight - 30
        split = _few_row_split(scene)
        assert split is not None
        against.append(
            Fact("split", f"{split.sentence}: the number of rows decides, not the restore", split.values)
        )
    text = "the prefix that the cache restored is not what a cold prefill computes"
    step = "run_match" if not cold.requests else "wide_restore" if hits_only(scene) else "equal_m"
    return Hypothesis(
        "wrong_restore", text, (DIFFERENT_FUNCTION,), grade, weight, tuple(speaks_for), tuple(against), step
    )


def _few_row_split(scene: Scene) -> Split | None:
    """Divergent and clean requests are parted by how many rows the extend had, few rows diverging."""
    for split in splits_of(scene):
        if split.quantity == "extend_rows" and not split.above:
            others = {s.quantity for s in splits_of(scene) if s is not split}
            if not others & {"cached_tokens", "prompt_len", "total_len"}:
                return split
    return None


def few_row_extend(scene: Scene) -> Hypothesis | None:
    """Arithmetic that depends on the row count, where extends of few rows exist only on hits."""
    if not hits_only(scene) or scene.hit.extend_rows is None:
        return None
    hit = scene.hit
    rows = hit.extend_rows
    assert rows is not None
    split = _few_row_split(scene)
    if rows[0] > _FEW_ROWS and split is None:
        return None
    extend = "1 row" if rows == (1, 1) else f"{span(rows)} rows"
    speaks_for = [
        Fact(
            "few_rows",
            f"hits extend their prefix by {extend}, and extends of so few rows exist on hits only: "
            "arithmetic that depends on the number of rows would look the same",
            {"extend_rows": list(rows)},
        )
    ]
    against: list[Fact] = []
    grade, weight = "unknown", 40.0
    if is_small(hit):
        speaks_for.append(size_fact(hit))
    else:
        weight -= 20
        against.append(size_fact(hit))
    if split is not None:
        grade, weight = "probable", 70.0
        speaks_for.append(Fact("split", split.sentence, split.values))
    elif hit.dirty < hit.requests:
        weight -= 15
        against.append(
            Fact(
                "some_hits_clean",
                f"{hit.requests - hit.dirty} of {hit.requests} hits are clean, and their number of rows "
                "does not set "
                "them apart",
                scene.counts,
            )
        )
    text = "an operator rounds differently when an extend has few rows, which happens on hits only"
    return Hypothesis(
        "few_row_extend",
        text,
        (BATCH_INVARIANCE,),
        grade,
        weight,
        tuple(speaks_for),
        tuple(against),
        "wide_restore",
    )


def place_in_batch(scene: Scene) -> Hypothesis | None:
    """Which requests diverge follows their place in the list."""
    for signature in scene.signatures:
        place = signature.place
        if place is None:
            continue
        path = signature.hit if signature.hit.dirty else signature.cold
        condition = DIFFERENT_FUNCTION if path is signature.hit else BATCH_INVARIANCE
        fact = Fact(
            "place",
            f"{signature.helper}: {place.sentence} (by chance: {place.chance:.1g})",
            {"kind": place.kind},
        )
        text = (
            "what a request gets depends on its place in the batch, as with an index that counts rows of "
            "others"
        )
        if place.kind == "tail":
            text += ", or on what ran before it"
        return Hypothesis("place_in_batch", text, (condition,), "unknown", 52, (fact,), (), "alone")
    return None
