"""What the answers of the GPU list must be, and what they say in a few words; origins: truth_of_origins.py.

Each check takes the documents of a row by name and says what in them contradicts what is known, and what
they leave open; its docstring is all that it looks at.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from klbench.core.columns import HELPERS
from tests.gpu.judgement import RIGHT, Documents, Judgement, together, undecided, wrong
from tests.gpu.models import LAYERS

_FEWER_BYTES = 200
"""From width 1024 on digests take less than this part of a dump's bytes."""
_SLOWER = 1.02
"""A helper's wall time is within this of sglang's own."""
_ATTENTION = re.compile(r"(model\.)?layers\.\d+\.self_attn\.attn")


# Clean servers.


def _clean_helpers(helpers: Mapping[str, Mapping[str, Any]]) -> Judgement:
    """All three ran, were compared, and no token differs: what was not compared is open, never clean."""
    found = []
    for name in HELPERS:
        helper = helpers.get(name, {"status": "not_run", "reason": "it is not in the document"})
        status, differ = helper["status"], helper.get("divergent_tokens")
        if status in ("diverged", "error") or differ:
            found.append(wrong(f"{name} is {status}, {differ} differ"))
        elif status != "clean":
            found.append(undecided(f"{name} is {status}: {helper.get('reason')}"))
    return together(found)


def run_is_clean(documents: Documents) -> Judgement:
    document = documents["run"]
    status = document["verdict"]["status"]
    verdict = {"none": RIGHT, "undecided": undecided("the verdict is undecided")}
    return _clean_helpers(document["helpers"]) + verdict.get(status, wrong(f"verdict {status}"))


def says_run(documents: Documents) -> str:
    return "; ".join(
        f"{name} {helper['status']}, {helper['divergent_tokens']} of {helper['tokens']} differ"
        for name, helper in documents["run"]["helpers"].items()
    )


def _clean_captures(document: Mapping[str, Any], helpers: Iterable[str]) -> Judgement:
    """Each of `helpers` was captured by digests, no capture changed a logprob, and none accuses anybody."""
    captures = document["captures"]
    found = [wrong(f"an error: {error['what']}") for error in document["errors"]]
    for made in captures:
        if made["changed_logprobs"] or made["findings"]:
            changed, accused = made["changed_logprobs"], len(made["findings"])
            found.append(wrong(f"capture of {made['helper']}: {changed} changed, {accused} findings"))
        if not made["alignment"]["proved"]:
            found.append(undecided(f"capture of {made['helper']}: its rows were not paired"))
    captured = {made["helper"] for made in captures if made["backend"] == "digest"}
    found += [undecided(f"{name} was not captured") for name in helpers if name not in captured]
    return together(found)


def is_clean(documents: Documents) -> Judgement:
    """The helpers and the captures of one server, from beginning to end."""
    return _is_clean(documents["clean"], HELPERS)


def _is_clean(document: Mapping[str, Any], captured: Iterable[str]) -> Judgement:
    cut = RIGHT if document["finished"] else undecided("it was cut before its end")
    return cut + _clean_helpers(document["helpers"]) + _clean_captures(document, captured)


def says_clean(documents: Documents) -> str:
    document = documents["clean"]
    helpers = ", ".join(
        f"{name} {helper['status']}, {helper.get('divergent_tokens')} of {helper.get('tokens')} differ"
        for name, helper in document["helpers"].items()
    )
    changed = sum(made["changed_logprobs"] for made in document["captures"])
    compared = sum(made["compared_logprobs"] for made in document["captures"])
    findings = sum(len(made["findings"]) for made in document["captures"])
    return f"{helpers}; captures changed {changed} of {compared} logprobs, {findings} findings"


# What it costs.


def cost_is_known(documents: Documents) -> Judgement:
    """On a clean server both back ends captured the same request, digests in less time, in fewer files and in
    a part of the bytes; and our helpers take as long as sglang's own, run in turns with them."""
    document = documents["clean"]
    found = [_is_clean(document, ["match"])]
    made = {capture["backend"]: capture for capture in document["captures"]}
    if not {"digest", "dumper"} <= made.keys():
        found.append(undecided("not both back ends captured"))
    else:
        found.append(_cheaper(made["digest"], made["dumper"]))
    for name in HELPERS:
        ours = document["helpers"].get(name, {}).get("all_s", [])
        stock = [one[name]["elapsed_s"] for one in document["stock"] if name in one]
        found.append(_as_fast(name, ours, stock))
    return together(found)


def _cheaper(digest: Mapping[str, Any], dumper: Mapping[str, Any]) -> Judgement:
    found = []
    if digest["bytes"] * _FEWER_BYTES >= dumper["bytes"]:
        found.append(wrong(f"digests are more than 1/{_FEWER_BYTES} of the dumper's bytes"))
    if digest["capture_s"] >= dumper["capture_s"]:
        found.append(wrong("digests take as long as the dumper"))
    if digest["files"] >= dumper["files"]:
        found.append(wrong("digests write as many files as the dumper"))
    return together(found)


def _as_fast(name: str, ours_s: list[float], stock_s: list[float]) -> Judgement:
    """Wrong only where each of ours is past the budget of each of theirs: a few runs scatter."""
    if not ours_s or not stock_s:
        return undecided(f"{name} was not timed beside sglang's own")
    ratio = statistics.median(ours_s) / statistics.median(stock_s)
    if ratio <= _SLOWER:
        return RIGHT
    said = f"{name} takes {ratio:.2f}x of sglang's own, past {_SLOWER}"
    if min(ours_s) > _SLOWER * max(stock_s):
        return wrong(said)
    return undecided(f"{said}, and {len(ours_s)} and {len(stock_s)} runs overlap")


def says_cost(documents: Documents) -> str:
    document = documents["clean"]
    parts = [
        f"{made['backend']} {made['capture_s']:.1f} s, {made['bytes'] / 1e6:.1f} MB in {made['files']} files"
        for made in document["captures"]
    ]
    for name, helper in document["helpers"].items():
        if theirs := [made[name]["elapsed_s"] for made in document["stock"]]:
            ours, stock = statistics.median(helper["all_s"]), statistics.median(theirs)
            parts.append(f"{name} {ours:.2f} s, sglang's own {stock:.2f} s ({ours / stock:.2f}x)")
    return "; ".join(parts)


# The census.

ENDS = ("model.embed_tokens", "model.norm", "lm_head", "logprob")
EACH_LAYER = (
    *("input_layernorm", "self_attn.qkv_proj", "self_attn.rotary_emb", "self_attn.o_proj"),
    "post_attention_layernorm",
)
MLP = {
    "dense": ("mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj"),
    "moe": ("mlp.gate", "mlp.topk", "mlp.experts"),
}
_ROW_BY_ROW = ("embed_tokens", "rotary_emb", "act_fn")
"""Copies and elementwise functions: no number of rows can change a row's bits."""


def census_of_dense(documents: Documents) -> Judgement:
    return _census(documents["census"], "dense")


def census_of_moe(documents: Documents) -> Judgement:
    return _census(documents["census"], "moe")


def _census(document: Mapping[str, Any], model: str) -> Judgement:
    """Every operator without a state was judged, with one row and with more; what works element by element is
    not accused, and what is accused has the number of rows at which it changes. Whether a matrix product or a
    norm changes depends on shapes and libraries: that is not known beforehand, and not judged."""
    operators = {entry["module"]: entry for entry in document["operators"]}
    names = (*EACH_LAYER, *MLP[model])
    expected = [*ENDS, *(f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in names)]
    found = [undecided(f"{module} is not listed") for module in expected if module not in operators]
    for module, entry in operators.items():
        status = entry["status"]
        if "q_norm" in module or "k_norm" in module:
            found.append(wrong("the fused q/k norm is listed as a module"))
        elif status == "error":
            found.append(wrong(f"{module}: {entry['reason']}"))
        elif status in ("skipped", "not_repeatable"):
            found.append(undecided(f"{module} was not judged: {entry['reason']}"))
        elif status == "not_invariant" and module.endswith(_ROW_BY_ROW):
            found.append(wrong(f"{module} works element by element, and is said to change"))
        elif status == "not_invariant" and entry["first_M"] is None:
            found.append(wrong(f"{module} changes, and it is not said from how many rows on"))
        elif status == "invariant" and not {1} < set(entry["tried_M"]):
            found.append(undecided(f"{module} was not called with one row and with more"))
    return together(dict.fromkeys(found))


def says_census(documents: Documents) -> str:
    by_class: dict[str, list[int]] = {}
    for entry in documents["census"]["operators"]:
        if entry["status"] == "not_invariant":
            by_class.setdefault(entry["module"].rpartition(".")[2], []).append(entry["first_M"])
    summary = documents["census"]["summary"]
    named = "; ".join(f"{name} from M {min(firsts)} ({len(firsts)})" for name, firsts in by_class.items())
    kept = f"{summary['invariant']} operators keep their bits with 1 to {documents['census']['rows']} rows"
    return f"{kept}; {summary['not_invariant']} do not{': ' * bool(named)}{named}"


# Planted faults.


def all_right(documents: Documents) -> Judgement:
    return _all_right(documents, lambda _: False)


def all_right_beside_the_window_kernel(documents: Documents) -> Judgement:
    """As `all_right`, but klbench may name attention too: FlashAttention-3 with a window is not
    batch-invariant by itself (window_kernel.py), so such an origin is true whatever was planted."""
    return _all_right(documents, _right_beside_attention)


def _all_right(documents: Documents, excused: Callable[[Mapping[str, Any]], bool]) -> Judgement:
    document = documents["selftest"]
    entries = [*document["cases"], *document["clean"]]
    left = document["planned"] - len(entries)
    found = [undecided(f"{left} were not judged")] if left else []
    for entry in entries:
        answer = entry["answer"]
        # Planted where it cannot fire, to see that said.
        silent = answer == "did_not_fire" and entry.get("cannot_fire")
        if answer == "right" or silent or excused(entry):
            continue
        said = f"{entry['fault']} {answer}"
        found.append(undecided(said) if answer in ("undecided", "did_not_fire", "error") else wrong(said))
    return together(found)


_PLANTED = ("helpers", "layer", "position", "kind")
"""The marks that speak of what was planted alone."""


def _right_beside_attention(entry: Mapping[str, Any]) -> bool:
    """Whether all marks of the planted fault are right, its condition is among those named, and everything
    else that is accused is an attention operator."""
    if entry["answer"] not in ("wrong", "undecided") or "located" not in entry:
        return False
    marks, why = entry["marks"], entry["why"]
    ruled = all(marks[name] in ("right", "no_rule", "none") for name in _PLANTED)
    if not ruled or marks["condition"] == "wrong":
        return False
    accused = why.partition("accused too: ")[2].partition(";")[0]
    named = [part.strip().partition(" at ")[0].split(" ", 1) for part in accused.split(", ") if part]
    return bool(named) and all(
        kind == "operator" and _ATTENTION.fullmatch(module) is not None for kind, module in named
    )


def says_selftest(documents: Documents) -> str:
    counts: dict[str, int] = {}
    for entry in documents["selftest"]["cases"]:
        counts[entry["answer"]] = counts.get(entry["answer"], 0) + 1
    return ", ".join(f"{count} {answer.replace('_', ' ')}" for answer, count in sorted(counts.items()))


# Graphs and overlap.


def probe_found(documents: Documents) -> Judgement:
    """The attention of layer 0 differs from the first decoded row on: layer 1 stores what follows from it."""
    document = documents["probe"]
    found = [] if document["graphs"] else [wrong("the server replays no graphs")]
    if document["capture"]["changed_logprobs"]:
        found.append(wrong(f"looking changed {document['capture']['changed_logprobs']} logprobs"))
    origins = [finding for finding in document["findings"] if not finding["latent"]]
    if not origins:
        return together([*found, undecided("nothing was found")])
    layer, row = origins[0]["layer"], origins[0]["positions"]["first"]
    if layer != 1 or row != document["first_row"]:
        found.append(wrong(f"layer {layer} at row {row}"))
    return together(found)


def says_probe(documents: Documents) -> str:
    document = documents["probe"]
    found = [finding for finding in document["findings"] if not finding["latent"]]
    what = "nothing found"
    if found:
        row = found[0]["positions"]["first"]
        what = f"{found[0]['grade']} {' or '.join(found[0]['kinds'])} {found[0]['module']} at row {row}"
    return f"graphs {document['graphs']}: {what}"


def toggles_change_nothing(documents: Documents) -> Judgement:
    """Deterministic kernels give the same bits with graphs and overlap on and off; both have answered."""
    made = {one["name"]: one for one in documents["experiment"]["experiments"]}
    found = []
    for name in ("graphs", "overlap"):
        outcome = made.get(name, {"outcome": "not_made"})["outcome"]
        if outcome in ("not_made", "not_possible", "not_comparable", "no_effect"):
            found.append(undecided(f"{name}: {made.get(name, {}).get('text') or 'it was not made'}"))
        elif outcome != "same_bits":
            found.append(wrong(f"{name}: {outcome}"))
    return together(found)


def says_experiments(documents: Documents) -> str:
    return "; ".join(f"{made['name']} {made['outcome']}" for made in documents["experiment"]["experiments"])
