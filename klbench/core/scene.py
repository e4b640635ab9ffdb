"""What an explanation may look at: a run's signatures, split by the path that requests went, and the server.

    scene = make_scene(signatures, summaries, server)
    scene.cold.dirty, scene.hit.dirty, scene.traits.experts

The facts that several explanations name are made here, so that they read alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klbench.core.columns import HelperName
from klbench.core.kl import HelperSummary
from klbench.core.model_traits import ModelTraits, model_traits
from klbench.core.residues import Residue, Split
from klbench.core.signature import PathReading, Signature, read_paths

LOGPROB_ROUNDING_NATS = 2e-5
"""Two ways to compute a logprob from the same float32 logits differ by no more than this."""

ROUNDING_MEDIAN_NATS = 0.02
ROUNDING_MAX_NATS = 1.0
"""Rounding makes small differences without a huge tail; wrong state or a wrong mask need not."""
ROUNDING_SEEN_NATS = 0.2
"""Above every median that rounding alone was seen to make on an H200: 0.05 in a dense model, 0.12 with
experts, 0.15 with K/V in fp8 (tests/gpu/results)."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One piece of evidence."""

    code: str
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "text": self.text, "values": dict(self.values)}


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """All that an explanation may look at: a run's signatures, split by path, and the server."""

    signatures: tuple[Signature, ...]
    summaries: Mapping[HelperName, HelperSummary]
    cold: PathReading
    hit: PathReading
    server: Mapping[str, Any]
    traits: ModelTraits
    retracted: int = 0
    """Divergent requests that were retracted and computed again."""

    @property
    def counts(self) -> dict[str, int]:
        return {
            "cold": self.cold.requests,
            "cold_dirty": self.cold.dirty,
            "hit": self.hit.requests,
            "hit_dirty": self.hit.dirty,
        }

    @property
    def dirty(self) -> tuple[PathReading, ...]:
        return tuple(part for part in (self.cold, self.hit) if part.dirty)

    @property
    def small(self) -> bool:
        """Whether all differences are as small as rounding makes them."""
        return all(is_small(part) for part in self.dirty)

    @property
    def beyond_rounding(self) -> bool:
        """Whether all differences are larger than rounding alone was ever seen to make them."""
        return bool(self.dirty) and all(part.median_abs_nats > ROUNDING_SEEN_NATS for part in self.dirty)

    @property
    def window(self) -> int | None:
        value = self.server.get("sliding_window")
        return value if isinstance(value, int) and value > 0 else None


def is_small(part: PathReading) -> bool:
    return part.median_abs_nats <= ROUNDING_MEDIAN_NATS and part.max_abs_nats <= ROUNDING_MAX_NATS


def make_scene(
    signatures: Sequence[Signature],
    summaries: Mapping[HelperName, HelperSummary],
    server: Mapping[str, Any],
    retracted: Mapping[HelperName, Collection[int]] | None = None,
) -> Scene:
    """`retracted`: the requests of each helper that were computed again."""
    cold, hit = read_paths(signatures)
    again = sum(
        int(summaries[helper].divergent_tokens[request] > 0)
        for helper, requests in (retracted or {}).items()
        if helper in summaries
        for request in requests
        if 0 <= request < summaries[helper].requests
    )
    return Scene(tuple(signatures), dict(summaries), cold, hit, server, model_traits(server), again)


def span(values: tuple[int, int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]} to {values[1]}"


def residues_of(scene: Scene) -> Iterator[Residue]:
    for signature in scene.signatures:
        yield from signature.residues


def splits_of(scene: Scene) -> Iterator[Split]:
    for signature in scene.signatures:
        yield from signature.splits


def hits_only(scene: Scene) -> bool:
    return scene.hit.dirty > 0 and scene.cold.requests > 0 and scene.cold.dirty == 0


def inside_window(part: PathReading, window: int) -> bool:
    """Whether some request diverges at a token that reads fewer keys than the window holds."""
    return part.readings is not None and part.readings.position[0] < window


def cold_dirty_fact(scene: Scene) -> Fact:
    counts = scene.counts
    return Fact(
        "cold_dirty",
        f"requests that restored nothing diverge ({counts['cold_dirty']} of {counts['cold']}): decode and "
        "prefill "
        "disagree on the same tokens without any restore",
        counts,
    )


def hits_only_fact(scene: Scene) -> Fact:
    counts = scene.counts
    return Fact(
        "hits_only",
        f"only requests that restored a cached prefix diverge ({counts['hit_dirty']} of {counts['hit']}; "
        "none of "
        f"{counts['cold']} cold ones): the restored state is suspected",
        counts,
    )


def size_fact(part: PathReading) -> Fact:
    words = "larger than rounding makes them"
    if is_small(part):
        words = "small, as rounding makes them"
    elif part.median_abs_nats <= ROUNDING_SEEN_NATS:
        words = "larger than rounding makes them in most models"
    return Fact(
        "size",
        f"the differences are {words}: median {part.median_abs_nats:.2g}, largest {part.max_abs_nats:.2g} "
        "nats",
        {"median_abs_nats": part.median_abs_nats, "max_abs_nats": part.max_abs_nats},
    )


def cold_in_chunks(scene: Scene) -> bool:
    """Whether clean cold requests were longer than a prefill chunk: they extended a prefix of their own."""
    chunk = scene.server.get("chunked_prefill_size")
    if not isinstance(chunk, int) or chunk <= 0 or scene.cold.dirty:
        return False
    return any(
        bool(
            (
                (part.requests.cached == 0) & (part.requests.prompt_len + part.requests.output_len > chunk)
            ).any()
        )
        for part in scene.signatures
    )
