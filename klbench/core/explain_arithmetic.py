"""Explanations by condition 1: the same function, rounded otherwise because the batch is another.

Each returns a hypothesis, or None where it cannot be meant.
"""

from __future__ import annotations

from klbench.core.experiments import quantised_kv
from klbench.core.hypotheses import BATCH_INVARIANCE, Hypothesis
from klbench.core.residues import KV_TILES
from klbench.core.scene import (
    LOGPROB_ROUNDING_NATS,
    Fact,
    Scene,
    cold_dirty_fact,
    inside_window,
    is_small,
    size_fact,
)
from klbench.core.text import counted


def not_deterministic(scene: Scene) -> Hypothesis | None:
    """The server never promised batch invariance."""
    if scene.server.get("deterministic") is not False:
        return None
    fact = Fact(
        "not_deterministic",
        "the server runs without deterministic inference: its operators may round differently with every "
        "batch, "
        "and that noise hides everything else",
        scene.counts,
    )
    text = "operators round differently with every batch, because deterministic inference is off"
    return Hypothesis(
        "not_deterministic", text, (BATCH_INVARIANCE,), "probable", 100, (fact,), (), "deterministic"
    )


def row_count(scene: Scene) -> Hypothesis | None:
    """An operator's result depends on how many rows share its forward."""
    cold = scene.cold
    if not cold.dirty and not (scene.hit.dirty and not cold.requests):
        return None
    part = cold if cold.dirty else scene.hit
    speaks_for = [cold_dirty_fact(scene)] if cold.dirty else []
    against: list[Fact] = []
    grade, weight = "unknown", 40.0
    all_dirty = part.dirty == part.requests
    early = part.where in ("from_first_token", "mixed")
    if is_small(part):
        speaks_for.append(size_fact(part))
    else:
        weight -= 20
        against.append(size_fact(part))
    if part.where in ("constant_offset", "constant_position"):
        weight -= 25
        against.append(
            Fact(part.where, "rounding that follows the number of rows would not wait for one place", {})
        )
    window = scene.window
    inside = window is None or inside_window(part, window)
    if cold.dirty and early and is_small(part) and inside:
        grade, weight = "probable", 60.0
        if all_dirty:
            weight += 5
        speaks_for.append(
            Fact(
                "small_from_the_start",
                "the differences are small and begin with the first decoded tokens, as rounding that "
                "depends on the "
                "number of rows does; a wrong position or mask of small effect would look alike",
            )
        )
        if cold.before_decode:
            speaks_for.append(
                Fact(
                    "prefill_differs_too",
                    f"in {counted(cold.before_decode, 'cold request')} the first generated token differs, "
                    "which a prefill computes in both arms: nothing of decode is needed for it",
                    {"requests": cold.before_decode},
                )
            )
        if cold.all_from_first and cold.max_abs_nats <= LOGPROB_ROUNDING_NATS:
            grade, weight = "unknown", 40.0
            against.append(
                Fact(
                    "last_step",
                    "a difference before the logits would have grown larger than a logprob's rounding",
                )
            )
    elif not inside:
        against.append(
            Fact(
                "only_past_window",
                f"nothing diverges within the sliding window of {window} tokens: what happens there may "
                "be its cause",
                {"window": window},
            )
        )
    if scene.traits.experts:
        speaks_for.append(
            Fact(
                "experts",
                "the model routes tokens to experts: a difference of one ulp at the router can change an "
                "expert, so "
                "a small cause has large effects, and no threshold of a dense model says anything here",
            )
        )
    text = "an operator's result depends on how many rows share its forward"
    return Hypothesis(
        "row_count", text, (BATCH_INVARIANCE,), grade, weight, tuple(speaks_for), tuple(against), "census"
    )


def tile_edge(scene: Scene) -> Hypothesis | None:
    """Attention walks over the keys in tiles, and decode's tile is another than prefill's."""
    part = scene.cold if scene.cold.edge is not None else scene.hit
    edge = part.edge
    if edge is None or edge < 2:
        return None
    row = edge - 1
    tiles = [tile for tile in KV_TILES if row % tile == 0]
    fact = Fact(
        "constant_position",
        f"each of them begins at position {edge}, row {row}, whatever the prompt's length",
        {"position": edge, "row": row, "tiles": tiles},
    )
    speaks_for, against = [fact], []
    grade, weight = "unknown", 35.0
    near_window = scene.window is not None and abs(row - scene.window) <= 2
    if tiles:
        grade, weight = ("unknown", 45.0) if near_window else ("probable", 70.0)
        speaks_for.append(
            Fact(
                "tile",
                f"row {row} is the first of a new tile of {tiles[-1]} keys (K/V length {edge})",
                {"tile": tiles[-1]},
            )
        )
    else:
        against.append(
            Fact("no_tile", f"row {row} begins no tile of {', '.join(map(str, KV_TILES))} keys", {})
        )
    if near_window:
        against.append(
            Fact(
                "window",
                f"the model's sliding window of {scene.window} tokens ends there, too",
                {"window": scene.window},
            )
        )
    if quantised_kv(scene.server):
        speaks_for.append(
            Fact(
                "quantised_kv",
                f"the K/V cache is {scene.server.get('kv_cache_dtype')}: its kernels have tiles of their own",
                {},
            )
        )
    text = "attention splits the keys into other tiles in decode than in prefill"
    step = "kv_dtype" if quantised_kv(scene.server) else "equal_m"
    return Hypothesis(
        "tile_edge", text, (BATCH_INVARIANCE,), grade, weight, tuple(speaks_for), tuple(against), step
    )


def floor_not_zero(scene: Scene) -> Hypothesis | None:
    """Prefill and decode are two algorithms by nature, or a quantised path scales over the batch."""
    floor = scene.traits.floor
    if not scene.dirty or floor is None or not scene.cold.dirty or not is_small(scene.cold):
        return None
    facts = (
        Fact("floor", floor, {"architecture": scene.traits.architecture}),
        size_fact(scene.cold),
    )
    text = "the floor of this class of operators is not zero: prefill and decode are two algorithms"
    return Hypothesis("floor_not_zero", text, (BATCH_INVARIANCE,), "probable", 80, facts, (), "control")


def quantised(scene: Scene) -> Hypothesis | None:
    """A quantised path that deterministic inference does not cover."""
    kv, weights = scene.traits.quantised_kv, scene.traits.quantised_weights
    if not scene.cold.dirty or not (kv or weights):
        return None
    what = [f"K/V cache {kv}"] if kv else []
    what += [f"weights {weights}"] if weights else []
    fact = Fact(
        "quantised",
        f"quantised: {', '.join(what)}; scales that are taken over a batch cannot be batch-invariant, and "
        "deterministic inference does not cover every quantised kernel",
        {"kv_cache_dtype": kv, "quantization": weights},
    )
    text = "a quantised path is not batch-invariant"
    weight = 42 if scene.small else 46
    return Hypothesis(
        "quantised", text, (BATCH_INVARIANCE,), "unknown", weight, (fact,), (), "kv_dtype" if kv else "census"
    )
