"""The entries of the fault catalogue about state, K/V rows and convolutions. Standard library only."""

from typing import Mapping, Tuple

from .faults_truth import ALL_HELPERS, ALL_MODELS, HITS, Fault, Truth

_ATTENTION = "model.layers.{layer}.self_attn.attn"
_CONVOLUTION = "model.layers.{layer}.conv.conv1d"


def _restore(name: str, explanation: Tuple[str, str], requests: str, **changed: int) -> Fault:
    """Rows of a restored prefix are wrong; `changed` are the defaults that make the variant."""
    parameters: Mapping[str, int] = {
        "layer": 1,
        "back": 4,
        "count": 1,
        "modulus": 1,
        "residue": 0,
        "spared": 0,
        "unhooked": 0,
        **changed,
    }
    return Fault(
        name=name,
        explanation=explanation,
        parameters=parameters,
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_restore",),
            dirty_helpers=HITS,
            phase="restored",
            first="cached",
            requests=requests,
            fires="first forwards with a prefix",
            models=ALL_MODELS,
            needs=("hits", "others") if parameters["spared"] else ("hits",),
        ),
    )


def _write(name: str, explanation: Tuple[str, str], first: str, fires: str, **parameters: int) -> Fault:
    return Fault(
        name=name,
        explanation=explanation,
        parameters=parameters,
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_write",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first=first,
            fires=fires,
            models=ALL_MODELS,
        ),
    )


_HIT = "those with a restored prefix"

_KV_SLOTS: Tuple[Fault, ...] = (
    Fault(
        name="slot-reuse",
        explanation=(
            "Before decode step `step` of each request the slot `back` rows before its prompt's end is given",
            "to the batch's next request, which puts a key there in one layer.",
        ),
        parameters={"layer": 1, "step": 6, "back": 5},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_restore",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="step",
            requests="those that do not decode alone",
            fires="decode step `step` of each request in a batch of two or more",
            models=ALL_MODELS,
            needs=("others",),
        ),
    ),
    Fault(
        name="window-evict",
        explanation=(
            "In decode one sliding-window layer finds the key `inside` rows behind the window's beginning",
            "gone, as if its slot had been freed while rows still read it. Prefill has all of them.",
        ),
        parameters={"layer": 1, "inside": 8},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_restore",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="decode",
            requests="those longer than the window",
            fires="decode rows past the window",
            models=("swa",),
            needs=("window",),
        ),
    ),
    Fault(
        name="chunk-key",
        explanation=(
            "A later chunk of a prompt finds the key `back` rows before it overwritten by its neighbour's in",
            "one layer: the same prompt cut elsewhere, or not at all, has other bits.",
        ),
        parameters={"layer": 1, "back": 2},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_restore",),
            dirty_helpers=ALL_HELPERS,
            phase="chunk",
            first="chunk",
            requests="those that are cut elsewhere when they are scored",
            fires="later chunks of a prompt",
            models=ALL_MODELS,
            needs=("chunks",),
        ),
    ),
    Fault(
        name="stale-retraction",
        explanation=(
            "When a retracted request is computed again, one layer leaves the key `back` rows before its",
            "last row as its new slot held it: of whoever had that slot before.",
        ),
        parameters={"layer": 1, "back": 2},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_write",),
            dirty_helpers=ALL_HELPERS,
            phase="resumed",
            first="resumed",
            requests="those that were retracted",
            fires="the forward that computes a retracted request again, with other slots than before",
            models=ALL_MODELS,
            needs=("retraction",),
        ),
    ),
)


def _convolution(
    name: str,
    explanation: Tuple[str, str],
    *,
    dirty: Tuple[str, ...] = HITS,
    kinds: Tuple[str, ...] = ("state_restore",),
    phase: str = "restored",
    first: str = "cached",
    requests: str = _HIT,
    fires: str = "first forwards with a prefix",
    needs: Tuple[str, ...] = ("hits",),
    **parameters: int,
) -> Fault:
    """A fault in the state of one layer's convolution."""
    return Fault(
        name=name,
        explanation=explanation,
        parameters=parameters,
        truth=Truth(
            condition="different_function",
            module=_CONVOLUTION,
            kinds=kinds,
            dirty_helpers=dirty,
            phase=phase,
            first=first,
            requests=requests,
            fires=fires,
            models=("hybrid",),
            needs=needs,
        ),
    )


_CONVOLUTIONS: Tuple[Fault, ...] = (
    _convolution(
        "conv-depth",
        (
            "A request that begins on a restored prefix gets the state that one convolution had `back`",
            "tokens earlier: a checkpoint of the right sequence, at the wrong depth.",
        ),
        layer=0,
        back=1,
    ),
    _convolution(
        "conv-zeroed",
        (
            "A request that begins on a restored prefix finds one convolution's state empty, as a cold",
            "request does: its first rows miss the inputs before them.",
        ),
        layer=0,
    ),
    _convolution(
        "conv-rounded",
        (
            "A request that begins on a restored prefix finds one convolution's state with `bits` bits of",
            "mantissa, as a compressed checkpoint has it: nearly right.",
        ),
        layer=0,
        bits=4,
    ),
    _convolution(
        "conv-other",
        (
            "A request that begins on a restored prefix gets one convolution's state of the request before",
            "it in the batch: sent alone, every request is clean.",
        ),
        requests="those with a restored prefix in a batch of two or more",
        needs=("hits", "others"),
        layer=0,
    ),
    _convolution(
        "conv-checkpoint",
        (
            "A checkpoint that is saved between two chunks of a prompt holds one convolution's state of",
            "`late` tokens earlier: whoever restores it begins with another state.",
        ),
        dirty=("prefill_cache_hit",),
        requests="those that restore a checkpoint of a chunk's end",
        fires="checkpoints that are saved while their request goes on",
        needs=("hits", "chunks"),
        layer=0,
        late=1,
    ),
    _convolution(
        "conv-write",
        (
            "At decode step `step` one convolution stores an input that is not the one it was given: the",
            "rows behind it read it.",
        ),
        dirty=ALL_HELPERS,
        kinds=("state_write",),
        phase="decode",
        first="step",
        requests="all",
        fires="decode step `step` of each request",
        needs=(),
        layer=0,
        step=4,
        ulps=64,
    ),
    _convolution(
        "conv-slot-reuse",
        (
            "Before decode step `step` of each request one convolution's slot is given away: it holds the",
            "state of the batch's request before it.",
        ),
        dirty=ALL_HELPERS,
        phase="decode",
        first="step",
        requests="those that do not decode alone",
        fires="decode step `step` of each request in a batch of two or more",
        needs=("others",),
        layer=3,
        step=6,
    ),
    _convolution(
        "conv-chunk",
        (
            "A later chunk of a prompt begins with an empty state in one convolution, as if it were the",
            "first: the same prompt cut elsewhere, or not at all, has other bits.",
        ),
        dirty=ALL_HELPERS,
        phase="chunk",
        first="chunk",
        requests="those that are cut elsewhere when they are scored",
        fires="later chunks of a prompt",
        needs=("chunks",),
        layer=0,
    ),
)

STATE: Tuple[Fault, ...] = (
    _restore(
        "restore-key",
        (
            "A request that begins on a restored prefix finds one key row of one layer overwritten by",
            "its neighbour's, `back` rows before the prefix ends; cold requests are untouched.",
        ),
        _HIT,
    ),
    _restore(
        "restore-value",
        (
            "A request that begins on a restored prefix finds one value row of one layer overwritten by",
            "its neighbour's, `back` rows before the prefix ends; cold requests are untouched.",
        ),
        _HIT,
        layer=2,
    ),
    _restore(
        "restore-page",
        (
            "A request that begins on a restored prefix finds the keys of its last 16 rows in one layer",
            "overwritten by the row before them, as if the last page were another's.",
        ),
        _HIT,
        back=16,
        count=16,
    ),
    _restore(
        "restore-residue",
        (
            "Only requests whose restored prefix has the length `residue` modulo `modulus` find a wrong key",
            "row, `back` rows before the prefix ends; all other hits are clean.",
        ),
        "those whose restored prefix has the residue",
        modulus=2,
    ),
    _restore(
        "restore-not-first",
        (
            "All requests of a batch but the first `spared` find a wrong key row in their restored prefix:",
            "sent alone, every request is clean.",
        ),
        "those with a restored prefix that are not the first of their batch",
        spared=1,
    ),
    _write(
        "key-write",
        (
            "At decode step `step` one layer stores a key that is not the one it was given: every later row",
            "of the request reads it.",
        ),
        "step",
        "decode step `step` of each request",
        layer=1,
        step=4,
        ulps=64,
        unhooked=0,
    ),
    _write(
        "value-write",
        (
            "At decode step `step` one layer stores a value that is not the one it was given: every later",
            "row of the request reads it.",
        ),
        "step",
        "decode step `step` of each request",
        layer=2,
        step=4,
        ulps=64,
    ),
    _write(
        "interval-write",
        (
            "Decode stores a wrong key in one layer whenever the position is a multiple of `interval`,",
            "as a checkpoint taken at the wrong moment would.",
        ),
        "interval",
        "decode rows at multiples of `interval`",
        layer=1,
        interval=16,
        ulps=64,
    ),
    Fault(
        name="key-overwrite",
        explanation=(
            "Before decode step `step` of each request the key row `back` rows before its prompt's end is",
            "overwritten in one layer, as if its slot had been given away too early.",
        ),
        parameters={"layer": 2, "step": 6, "back": 5},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("state_restore",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="step",
            fires="decode step `step` of each request",
            models=ALL_MODELS,
        ),
    ),
    *_KV_SLOTS,
    *_CONVOLUTIONS,
)
