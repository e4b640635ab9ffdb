"""Explanations by condition 2 and by races: decode and prefill do not compute the same thing.

Each returns a hypothesis, or None where it cannot be meant.
"""

from __future__ import annotations

from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION, RACE, Hypothesis
from klbench.core.residues import KV_TILES
from klbench.core.scene import (
    LOGPROB_ROUNDING_NATS,
    ROUNDING_MEDIAN_NATS,
    Fact,
    Scene,
    cold_dirty_fact,
    inside_window,
    is_small,
    size_fact,
    splits_of,
)
from klbench.core.text import counted


def not_numbers(scene: Scene) -> Hypothesis | None:
    """NaN or infinity: memory that was never written, or an overflow."""
    tokens = sum(signature.nan_tokens for signature in scene.signatures)
    if not tokens:
        return None
    have = counted(tokens, "token has", "tokens have")
    fact = Fact("nan", f"{have} a logprob that is no finite number", {"tokens": tokens})
    text = (
        "rows that were never written, padding that is multiplied instead of masked, or an overflow: a "
        "logprob is "
        "no number"
    )
    return Hypothesis("not_numbers", text, (DIFFERENT_FUNCTION,), "unknown", 90, (fact,), (), "repeats")


def window_slip(scene: Scene) -> Hypothesis | None:
    """The window, mask or positions are off in one of the two paths."""
    window = scene.window
    part = scene.cold if scene.cold.dirty else scene.hit
    if not part.dirty or (part is scene.hit and scene.cold.requests):
        return None
    speaks_for = [cold_dirty_fact(scene)] if scene.cold.dirty else []
    against: list[Fact] = []
    grade, weight = "unknown", 30.0
    if window is None:
        if part.where == "from_first_token" and is_small(part):
            weight = 15.0
    else:
        inside = inside_window(part, window)
        edge = part.edge
        if edge is not None and abs(edge - 1 - window) <= 2:
            at_tile = any((edge - 1) % tile == 0 for tile in KV_TILES)
            grade, weight = ("unknown", 50.0) if at_tile else ("probable", 75.0)
            speaks_for.append(
                Fact(
                    "window_edge",
                    f"each divergence begins at position {edge}, where the sliding window of {window} "
                    "tokens is full",
                    {"window": window, "position": edge},
                )
            )
            if at_tile:
                against.append(
                    Fact("tile", "a tile of the attention kernel ends at the same row", {"row": edge - 1})
                )
        elif inside:
            weight = 5.0
            against.append(
                Fact(
                    "inside_window",
                    f"requests diverge before the sliding window of {window} tokens is full: the window "
                    "alone is not "
                    "the cause",
                    {"window": window},
                )
            )
        else:
            weight = 45.0
            speaks_for.append(
                Fact(
                    "only_past_window",
                    f"nothing diverges before the sliding window of {window} tokens is full",
                    {"window": window},
                )
            )
    if not is_small(part):
        weight += 10
        speaks_for.append(size_fact(part))
    what = "window, mask or positions are" if window is not None else "mask or positions are"
    text = f"the {what} not the same in decode and prefill"
    if part.edge is not None and window is None:
        weight = 30.0
        speaks_for.append(
            Fact(
                "constant_position",
                f"each divergence begins at position {part.edge}",
                {"position": part.edge},
            )
        )
    return Hypothesis(
        "window_slip",
        text,
        (DIFFERENT_FUNCTION,),
        grade,
        weight,
        tuple(speaks_for),
        tuple(against),
        "equal_m",
    )


def decode_step(scene: Scene) -> Hypothesis | None:
    """Something happens after a fixed number of decode steps."""
    part = scene.cold if scene.cold.dirty else scene.hit
    if part.where != "constant_offset" or part.readings is None:
        return None
    offset = part.readings.offset[0]
    facts = [cold_dirty_fact(scene)] if scene.cold.dirty else []
    facts.append(
        Fact(
            "constant_offset",
            f"each of them begins at offset {offset}, whatever the prompt's length: something changes "
            "after a fixed "
            "number of decode steps; rounding would not wait",
            {"offset": offset},
        )
    )
    text = f"decode computes something else from its step {offset} on"
    return Hypothesis("decode_step", text, (DIFFERENT_FUNCTION,), "probable", 75, tuple(facts), (), "equal_m")


def interval(scene: Scene) -> Hypothesis | None:
    """Something happens whenever the absolute position crosses a multiple."""
    for signature in scene.signatures:
        for residue in signature.residues:
            if residue.quantity != "first divergent row" or signature.whole.where == "from_first_token":
                continue
            facts = (Fact("residue", residue.sentence, residue.values),)
            against: tuple[Fact, ...] = ()
            if residue.modulus in KV_TILES and residue.setting is None:
                against = (
                    Fact(
                        "split_boundary",
                        "a kernel that splits the keys by their number changes its split at such a "
                        "multiple, too: that "
                        "would be arithmetic",
                    ),
                )
            text = (
                f"state is written, kept or rotated wrongly when decode crosses a multiple of "
                f"{residue.modulus}"
            )
            return Hypothesis(
                "interval", text, (DIFFERENT_FUNCTION,), "probable", 72, facts, against, "equal_m"
            )
    return None


def length_residue(scene: Scene) -> Hypothesis | None:
    """What prefill hands to decode is wrong for prompts of certain lengths."""
    if not scene.cold.dirty:
        return None
    for signature in scene.signatures:
        if not signature.cold.dirty or signature.cold.dirty == signature.cold.requests:
            continue
        for residue in signature.residues:
            if residue.quantity not in ("prompt_len", "total_len"):
                continue
            gross = not is_small(signature.cold)
            stateful = scene.traits.state
            speaks_for = [Fact("residue", residue.sentence, residue.values)]
            if gross:
                speaks_for.append(size_fact(signature.cold))
            if stateful:
                speaks_for.append(
                    Fact(
                        "state", f"{scene.traits.architecture} hands a recurrent state from prefill to decode"
                    )
                )
            against = []
            if not gross and not stateful:
                against.append(
                    Fact(
                        "last_tile",
                        "a kernel that rounds its last, partly filled tile otherwise would look alike",
                    )
                )
            grade = "probable" if gross or stateful else "unknown"
            text = "what prefill leaves for decode is wrong for prompts of certain lengths"
            return Hypothesis(
                "length_residue",
                text,
                (DIFFERENT_FUNCTION,),
                grade,
                71 if grade == "probable" else 50,
                tuple(speaks_for),
                tuple(against),
                "pad",
            )
    return None


def chunk_boundary(scene: Scene) -> Hypothesis | None:
    """Prompts that are longer than a prefill chunk diverge and shorter ones do not."""
    for split in splits_of(scene):
        if split.boundary is not None and split.boundary[0] == "chunked_prefill_size" and split.above:
            fact = Fact("split", split.sentence, split.values)
            text = "state is lost, or the arithmetic changes, where a prompt is cut into prefill chunks"
            return Hypothesis(
                "chunk_boundary",
                text,
                (BATCH_INVARIANCE, DIFFERENT_FUNCTION),
                "unknown",
                80,
                (fact,),
                (),
                "chunk_size",
            )
    return None


def definition(scene: Scene) -> Hypothesis | None:
    """The two logprobs are not defined, or not computed, alike."""
    cold = scene.cold
    if cold.dirty < cold.requests or not cold.all_from_first:
        return None
    everywhere = Fact(
        "every_token",
        f"every cold request differs from its first {'compared' if cold.first_lost else 'generated'} token "
        f"on, {cold.contiguous_fraction:.0%} of "
        "all tokens, "
        "also where a prefill computes both",
        {"fraction": cold.contiguous_fraction},
    )
    tiny = cold.max_abs_nats <= LOGPROB_ROUNDING_NATS
    if tiny:
        fact = Fact(
            "last_step",
            f"the largest difference is {cold.max_abs_nats:.1g} nats: a difference before the logits "
            "would have grown "
            "to more than the float32 rounding of a logprob",
            {"max_abs_nats": cold.max_abs_nats},
        )
        text = "the logprob is computed in two ways from equal logits, as log of softmax and log-softmax are"
        return Hypothesis(
            "definition", text, (DIFFERENT_FUNCTION,), "probable", 78, (everywhere, fact), (), "locate"
        )
    if cold.contiguous_fraction < 0.95 or cold.median_abs_nats <= ROUNDING_MEDIAN_NATS:
        return None
    text = "the two logprobs are defined differently: temperature, penalties or a grammar in one of them"
    return Hypothesis(
        "definition", text, (DIFFERENT_FUNCTION,), "unknown", 48, (everywhere, size_fact(cold)), (), "locate"
    )


def race(scene: Scene) -> Hypothesis | None:
    """What happens depends on timing."""
    speaks_for: list[Fact] = []
    weight = 10.0
    conditions: tuple[str, ...] = (RACE,)
    pairs = [(s.helper, pair) for s in scene.signatures for pair in s.sharing.disagreeing]
    if pairs:
        helper, (one, other) = pairs[0]
        weight = 65.0
        conditions = (RACE, BATCH_INVARIANCE)
        speaks_for.append(
            Fact(
                "repeated_prompts_disagree",
                f"{helper}: requests {one} and {other} have the same prompt and as many cached tokens, "
                "and decode gave "
                "them different results: their place in the batch decides, or timing",
                {"helper": helper, "requests": [one, other], "pairs": len(pairs)},
            )
        )
    for signature in scene.signatures:
        whole = signature.whole
        lone = whole.dirty and whole.dirty <= max(1, whole.requests // 8)
        if lone and not signature.residues and not signature.splits and whole.requests >= 8:
            weight = max(weight, 47.0)
            speaks_for.append(
                Fact(
                    "few_without_pattern",
                    f"{signature.helper}: {whole.dirty} of {whole.requests} requests diverge, and nothing "
                    "sets them "
                    "apart",
                    {"helper": signature.helper},
                )
            )
    if not scene.dirty:
        return None
    text = "a race: what is read depends on when it was written"
    return Hypothesis("race", text, conditions, "unknown", weight, tuple(speaks_for), (), "repeats")


def retraction(scene: Scene) -> Hypothesis | None:
    """Each divergent request was retracted: its state was given up and computed again."""
    dirty = sum(part.dirty for part in scene.dirty)
    if not dirty or scene.retracted < dirty:
        return None
    each = "the divergent request" if dirty == 1 else f"each of the {dirty} divergent requests"
    fact = Fact(
        "retracted",
        f"{each} was retracted and computed again: the state it had is stale if anything of it is left, and "
        "the prefill that replaces it rounds as prefills do",
        {"requests": dirty},
    )
    text = "what a retraction leaves or computes again is not what decode had made"
    conditions = (BATCH_INVARIANCE, DIFFERENT_FUNCTION)
    return Hypothesis("retraction", text, conditions, "unknown", 85, (fact,), (), "pool")
