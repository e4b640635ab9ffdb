"""The entries of the fault catalogue, by family. Standard library only."""

from typing import Tuple

from .faults_entries_state import STATE
from .faults_truth import ALL_HELPERS, ALL_MODELS, ATTENTION_MODELS, HITS, Fault, Pair, Truth

__all__ = ["ARITHMETIC", "ATTENTION", "HEAD", "PAIRS", "STATE"]

_ROWS = "calls of at least `rows` rows: in prefill, and never in decode of a smaller batch"


def _rows(
    name: str,
    what: str,
    module: str,
    layer: int,
    kinds: Tuple[str, ...] = ("operator",),
    models: Tuple[str, ...] = ATTENTION_MODELS,
) -> Fault:
    """A token-wise operator that rounds otherwise in calls of many rows."""
    return Fault(
        name=name,
        explanation=(
            f"When `rows` or more rows share the call, {what} puts out the",
            "largest element of each row `ulps` units in the last place off: prefill rounds otherwise.",
        ),
        parameters={"layer": layer, "rows": 64, "ulps": 2},
        truth=Truth(
            condition="batch_invariance",
            module=module,
            kinds=kinds,
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="rows",
            fires=_ROWS,
            models=models,
        ),
    )


_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn.attn"

ARITHMETIC: Tuple[Fault, ...] = (
    Fault(
        name="o_proj-rows",
        explanation=(
            "When `rows` or more rows share the call, one layer's o_proj adds two rounded half sums,",
            "as a split-K kernel does: prefill rounds differently from decode, on every row alike.",
        ),
        parameters={"layer": 1, "rows": 64, "unhooked": 0},
        truth=Truth(
            condition="batch_invariance",
            module=_LAYER + "self_attn.o_proj",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="rows",
            fires=_ROWS,
        ),
    ),
    _rows("qkv_proj-rows", "one layer's qkv_proj", _LAYER + "self_attn.qkv_proj", 1, models=ALL_MODELS),
    _rows(
        "gate_up_proj-rows",
        "one layer's gate_up_proj",
        _LAYER + "mlp.gate_up_proj",
        2,
        models=("dense", "swa"),
    ),
    _rows("down_proj-rows", "one layer's down_proj", _LAYER + "mlp.down_proj", 0, models=("dense", "swa")),
    _rows("input_norm-rows", "one layer's first norm", _LAYER + "input_layernorm", 1),
    _rows("post_norm-rows", "the norm behind one layer's attention", _LAYER + "post_attention_layernorm", 2),
    _rows("q_norm-rows", "one layer's norm of query heads", _LAYER + "self_attn.q_norm", 1),
    _rows("activation-rows", "one layer's activation", _LAYER + "mlp.act_fn", 1, models=("dense", "swa")),
    _rows(
        "router-rows", "one layer's router (experts flip behind it)", _LAYER + "mlp.gate", 1, models=("moe",)
    ),
    _rows("experts-rows", "one layer's experts", _LAYER + "mlp.experts", 2, models=("moe",)),
    _rows(
        "residual-gap",
        "what lies between o_proj and the next norm",
        _LAYER + "self_attn.o_proj -> " + _LAYER + "post_attention_layernorm",
        1,
        kinds=("gap",),
    ),
    _rows("conv_in-rows", "one convolution's in_proj", _LAYER + "conv.in_proj", 0, models=("hybrid",)),
    _rows("conv-rows", "one layer's convolution", _LAYER + "conv.conv1d", 3, models=("hybrid",)),
    _rows(
        "conv-gap",
        "the gate behind one convolution",
        _LAYER + "conv.conv1d -> " + _LAYER + "conv.out_proj",
        0,
        kinds=("gap",),
        models=("hybrid",),
    ),
    _rows("ffn_norm-rows", "the norm behind one convolution", _LAYER + "ffn_norm", 3, models=("hybrid",)),
    Fault(
        name="collective-order",
        explanation=(
            "One layer's o_proj adds the rounded parts of `ranks` ranks in another order when `rows` rows",
            "share the call, as an all-reduce does that chooses by the message's size (simulated).",
        ),
        parameters={"layer": 2, "rows": 64, "ranks": 4},
        truth=Truth(
            condition="batch_invariance",
            module=_LAYER + "self_attn.o_proj",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="rows",
            fires=_ROWS,
        ),
    ),
    Fault(
        name="padding-scale",
        explanation=(
            "One layer's down_proj rounds each row to steps of its own scale. A call below `rows` rows",
            "is filled up to a multiple of `pad`, and the garbage in these rows sets the scale of all.",
        ),
        parameters={"layer": 1, "rows": 64, "pad": 8, "steps": 1024},
        truth=Truth(
            condition="batch_invariance",
            module=_LAYER + "mlp.down_proj",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="padded",
            fires="calls of fewer than `rows` rows that are no multiple of `pad`: decode, short extends",
            models=("dense", "swa"),
            needs=("padding",),
        ),
    ),
    Fault(
        name="late-norm",
        explanation=(
            "After `after` decode steps of a request one layer's first norm puts out the largest element of",
            "each row `ulps` units off: short generations are clean.",
        ),
        parameters={"layer": 2, "after": 8, "ulps": 2},
        truth=Truth(
            condition="different_function",
            module=_LAYER + "input_layernorm",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="after",
            fires="past `after` decode steps",
        ),
    ),
    Fault(
        name="batch-scale",
        explanation=(
            "One layer's down_proj rounds its input to `steps` steps of the largest value in the call,",
            "as dynamic quantisation does: a row's result depends on which other rows share the call.",
        ),
        parameters={"layer": 1, "steps": 4096},
        truth=Truth(
            condition="batch_invariance",
            module=_LAYER + "mlp.down_proj",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            fires="every call",
            models=("dense", "swa"),
        ),
    ),
    Fault(
        name="race",
        explanation=(
            "One layer's o_proj changes all rows of a call by `ulps` units in one call of `odds`, at random:",
            "no run repeats itself, whatever the batch and the cache.",
        ),
        parameters={"layer": 1, "odds": 8, "ulps": 2},
        truth=Truth(
            condition="race",
            module=_LAYER + "self_attn.o_proj",
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            requests="whichever are in the call",
            fires="any call, by chance",
        ),
    ),
)

ATTENTION: Tuple[Fault, ...] = (
    Fault(
        name="attention-blocks",
        explanation=(
            "In decode one layer's attention sums over blocks of `block` keys, each rounded, as a split-KV",
            "kernel does; prefill sums over all keys at once.",
        ),
        parameters={"layer": 1, "block": 64},
        truth=Truth(
            condition="batch_invariance",
            module=_ATTENTION,
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="decode",
            fires="decode rows with more than `block` keys",
            models=ALL_MODELS,
        ),
    ),
    Fault(
        name="attention-split",
        explanation=(
            "An extend splits the keys in the middle of its own rows: where the two rounded partial results",
            "meet depends on how many rows the request has in the call.",
        ),
        parameters={"layer": 0},
        truth=Truth(
            condition="batch_invariance",
            module=_ATTENTION,
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="split",
            fires="extends of two rows or more",
        ),
    ),
    Fault(
        name="attention-prompt",
        explanation=(
            "One layer's attention rounds an extend otherwise when its row count lies in the odd half of",
            "`tile` rows. Rows of the prompt are wrong, and decode inherits that through keys and values.",
        ),
        parameters={"layer": 0, "tile": 128, "ulps": 2},
        truth=Truth(
            condition="batch_invariance",
            module=_ATTENTION,
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="tile",
            requests="those of which one extend lies in an odd half and the other does not",
            fires="extends whose row count divided by half a tile is odd",
        ),
    ),
    Fault(
        name="decode-window",
        explanation=(
            "After `after` decode steps of a request, one layer's attention misses the key `back` rows",
            "before its own: only decode is wrong, and only from the middle of the output on.",
        ),
        parameters={"layer": 2, "after": 16, "back": 3},
        truth=Truth(
            condition="different_function",
            module=_ATTENTION,
            kinds=("operator",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="after",
            fires="past `after` decode steps",
            models=ALL_MODELS,
        ),
    ),
    *(
        Fault(
            name=f"window-{name}",
            explanation=(
                f"In decode one sliding-window layer looks back one row {what} its window;",
                "prefill masks as it should. Only requests that cross the window can show it.",
            ),
            parameters={"layer": 1},
            truth=Truth(
                condition="different_function",
                module=_ATTENTION,
                kinds=("operator",),
                dirty_helpers=ALL_HELPERS,
                phase="decode",
                first="decode",
                requests="those longer than the window",
                fires="decode rows past the window",
                models=("swa",),
                needs=("window",),
            ),
        )
        for name, what in (("short", "less than"), ("long", "more than"))
    ),
    Fault(
        name="suffix-position",
        explanation=(
            "The rows that are computed behind a restored prefix are rotated in one layer as if they stood",
            "one position further.",
        ),
        parameters={"layer": 1},
        truth=Truth(
            condition="different_function",
            module=_LAYER + "self_attn.rotary_emb",
            kinds=("operator",),
            dirty_helpers=HITS,
            phase="restored",
            first="cached",
            requests="those with a restored prefix",
            fires="first forwards with a prefix",
            models=("dense", "moe", "hybrid"),
            needs=("hits",),
        ),
    ),
)


HEAD: Tuple[Fault, ...] = (
    Fault(
        name="lm_head-rows",
        explanation=(
            "When `rows` or more rows share the call, the LM head moves the largest logit of each row by",
            "`ulps` units: scoring rounds differently from generating.",
        ),
        parameters={"rows": 64, "ulps": 2},
        truth=Truth(
            condition="batch_invariance",
            module="lm_head",
            kinds=("head",),
            dirty_helpers=ALL_HELPERS,
            phase="extend",
            first="scored",
            fires=_ROWS,
            models=ALL_MODELS,
        ),
    ),
    Fault(
        name="log-of-softmax",
        explanation=(
            "The sampler takes the logarithm of a softmax where scoring takes log-softmax: the same function",
            "on paper, other bits.",
        ),
        parameters={},
        truth=Truth(
            condition="different_function",
            module="logprob",
            kinds=("head",),
            dirty_helpers=ALL_HELPERS,
            phase="decode",
            first="divergent",
            fires="every sampled token",
            models=ALL_MODELS,
        ),
    ),
)

PAIRS: Tuple[Pair, ...] = (
    Pair(
        name="pair-outside",
        explanation=(
            "o_proj-rows in the last layer and a key of the first layer overwritten at decode step 6:",
            "neither lies in what the other spoils, so both must be named.",
        ),
        faults=("o_proj-rows:layer=3", "key-overwrite:layer=0"),
        masked=False,
    ),
    Pair(
        name="pair-inside",
        explanation=(
            "o_proj-rows in layer 1 and, in every row that it spoils, another arithmetic fault in layer 2:",
            "the second must be listed as masked, and found once the first is gone.",
        ),
        faults=("o_proj-rows:layer=1", "post_norm-rows:layer=2"),
        masked=True,
    ),
)
