"""What must be said of an origin on a GPU, and what was said in a few words.

Known: sglang's deterministic mode is bit-equal with fa3 on a Hopper GPU, for heads of 128 without a window;
it is not with fp8 keys and values (from K/V length 97 on), nor with triton, nor with a window
(window_kernel.py): there the attention of layer 0 is named from a decoded row on, the kind `operator` and
nothing else, and condition 1. Without the flag nothing is promised, and which operator differs first is not
known beforehand: there klbench must name one, and the condition.
"""

from collections.abc import Mapping
from typing import Any

from tests.gpu.judgement import RIGHT, Documents, Judgement, together, undecided, wrong

_TILE = 96
"""Keys up to which the fp8 path is bit-equal: the row of K/V length 97 differs first."""
_ATTENTION_0 = "model.layers.0.self_attn.attn"
_DELTA_RULE_0 = "model.layers.0.linear_attn.attn"


def _finding(documents: Documents) -> dict[str, Any]:
    found = [finding for finding in documents["locate"]["findings"] if not finding["latent"]]
    return found[0] if found else {}


def says_located(documents: Documents) -> str:
    finding = _finding(documents)
    if not finding:
        return "no finding"
    document = documents["locate"]
    verdict = document["verdict"]
    helpers = "; ".join(f"{name} {status}" for name, status in document.get("statuses", {}).items())
    said = (
        f"{finding['grade']} {' | '.join(finding['kinds'])} {finding['module']} at {finding['phase']} row "
        f"{finding['positions']['first']}, condition {', '.join(verdict['conditions'])} "
        f"({verdict['grade']}; {helpers})"
    )
    facts = [*verdict["evidence"], *finding["evidence"]]
    worth = ("constant_position", "tile", "experts_differ", "equal_m", "checkpoint_crossed", "window_crossed")
    return "; ".join([said, *(fact["text"].rstrip(".") for fact in facts if fact["code"] in worth)])


def _facts(documents: Documents) -> dict[str, Mapping[str, Any]]:
    """The evidence of the verdict and of the first finding, values by code."""
    document = documents["locate"]
    facts = [*document["verdict"]["evidence"], *_finding(documents).get("evidence", [])]
    return {fact["code"]: fact.get("values") or {} for fact in facts}


def _must_diverge(documents: Documents) -> Judgement:
    status = documents["locate"]["statuses"].get("match")
    if status == "diverged":
        return RIGHT
    return wrong("match is clean") if status == "clean" else undecided(f"match is {status}")


def _origin(documents: Documents, module: str | None) -> Judgement:
    """The first origin is that operator, in decode, and nothing else can be meant: of an operator that reads
    state the kind `operator` alone says that its inputs and the state it read are proved equal."""
    finding = _finding(documents)
    if not finding:
        return undecided("no origin is named")
    kinds = finding["kinds"]
    found = []
    if module is not None and finding["module"] != module:
        found.append(wrong(f"origin {finding['kind']} {finding['module']}"))
    if module is not None and finding["phase"] != "decode":
        found.append(wrong(f"it begins in {finding['phase']}"))
    possible = {"operator"} if module is not None else {"operator", "gap", "head"}
    if not possible & set(kinds):
        found.append(wrong(f"its kind is {' or '.join(kinds)}"))
    elif len(kinds) > 1:
        found.append(undecided(f"its kind may be {', '.join(kinds)}"))
    if finding["grade"] == "unknown":
        found.append(undecided("its grade is unknown"))
    return together(found)


def _condition(documents: Documents, *possible: str) -> Judgement:
    """The verdict names one condition, of those that are possible."""
    verdict = documents["locate"]["verdict"]
    named, grade = verdict["conditions"], verdict.get("grade", "unknown")
    if not named:
        return undecided("no condition is named")
    if not set(named) & set(possible):
        return wrong(f"condition {' and '.join(named)}")
    if len(named) > 1 or grade == "unknown":
        return undecided(f"the condition may be {' or '.join(named)} (grade {grade})")
    return RIGHT


def _capture(documents: Documents) -> Judgement:
    capture = documents["locate"]["capture"]
    if capture is None:
        return undecided("nothing was captured")
    changed = capture["changed_logprobs"]
    return wrong(f"capture changed {changed} logprobs") if changed else RIGHT


def _rounds_in(documents: Documents, module: str) -> Judgement:
    """An operator that is known not to be batch-invariant: it diverges, and is named with condition 1."""
    return (
        _must_diverge(documents)
        + _origin(documents, module)
        + _condition(documents, "batch_invariance")
        + _capture(documents)
    )


def attention_of_layer_0(documents: Documents) -> Judgement:
    return _rounds_in(documents, _ATTENTION_0)


def attention_of_layer_0_flips_experts(documents: Documents) -> Judgement:
    """As `attention_of_layer_0`, and it is said in which layer experts flip first."""
    experts = _facts(documents).get("experts_differ")
    said = RIGHT if experts and experts.get("layer") is not None else wrong("no expert is said to flip")
    return attention_of_layer_0(documents) + said


def tile_edge(documents: Documents) -> Judgement:
    """As `attention_of_layer_0`, from row 96 on whatever the prompt's length, said to be a tile's edge."""
    found = [attention_of_layer_0(documents)]
    finding, facts = _finding(documents), _facts(documents)
    if finding and finding["positions"]["first"] != _TILE:
        found.append(wrong(f"first row {finding['positions']['first']}, not {_TILE}"))
    if facts.get("constant_position", {}).get("row") != _TILE:
        found.append(wrong(f"the verdict does not say that each begins at row {_TILE}"))
    if "tile" not in facts:
        found.append(wrong("the verdict does not speak of a tile"))
    return together(found)


def attention_with_a_window(documents: Documents) -> Judgement:
    """As `attention_of_layer_0`, with requests past the window: the pool of the window is not accused."""
    crossed = RIGHT if "window_crossed" in _facts(documents) else undecided("no request passes the window")
    return attention_of_layer_0(documents) + crossed


def delta_rule_of_layer_0(documents: Documents) -> Judgement:
    """Prefill scans in chunks and decode recurs: the operator is known, which condition that is to be called
    is not, but it is one of the two and no race. A checkpoint must be passed."""
    crossed = RIGHT if "checkpoint_crossed" in _facts(documents) else undecided("no checkpoint is passed")
    return (
        _must_diverge(documents)
        + _origin(documents, _DELTA_RULE_0)
        + _condition(documents, "batch_invariance", "different_function")
        + _capture(documents)
        + crossed
    )


def rounding_without_the_flag(documents: Documents) -> Judgement:
    """Nothing is promised without the flag: condition 1, with an origin in arithmetic, of one kind. Which
    operator it is, and whether anything diverges at all, is not known beforehand."""
    on = wrong("the flag is on") if documents["locate"]["server"]["deterministic"] else RIGHT
    origin = _origin(documents, None)
    return on + origin + _condition(documents, "batch_invariance") + _capture(documents)


def rounding_without_the_flag_on_two(documents: Documents) -> Judgement:
    tp_size = documents["locate"]["server"]["tp_size"]
    ranks = RIGHT if tp_size == 2 else wrong(f"tp is {tp_size}")
    return rounding_without_the_flag(documents) + ranks
