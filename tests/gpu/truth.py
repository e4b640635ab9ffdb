"""What the answers of the GPU list must be, and what they say in a few words.

Each check takes the documents of a row by name and returns what is not as it must be, nothing where all is
right. Ground truth: sglang's deterministic mode is bit-equal with fa3 on a Hopper GPU, for heads of 128
without a window; it is not with fp8 keys and values, nor with triton, from the first decoded row on.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

Documents = Mapping[str, Any]
"""What the row's commands wrote, by the name of the JSON file."""

_FEWER_BYTES = 200
"""From width 1024 on digests take less than this part of a dump's bytes."""

_TILE = 96
"""Keys up to which the fp8 path is bit-equal: the row of K/V length 97 differs first."""


def run_is_clean(documents: Documents) -> list[str]:
    document = documents["run"]
    wrong = [
        f"{name} is {helper['status']}, {helper['divergent_tokens']} differ"
        for name, helper in document["helpers"].items()
        if helper["status"] != "clean" or helper["divergent_tokens"]
    ]
    if document["verdict"]["status"] != "none":
        wrong.append(f"verdict {document['verdict']['status']}")
    return wrong


def says_run(documents: Documents) -> str:
    return "; ".join(
        f"{name} {helper['status']}, {helper['divergent_tokens']} of {helper['tokens']} differ"
        for name, helper in documents["run"]["helpers"].items()
    )


def is_clean(documents: Documents) -> list[str]:
    document = documents["clean"]
    if not document["finished"]:
        return ["it was cut before its end"]
    if document["clean"]:
        return []
    wrong = [
        f"{name} {helper['status']}, {helper.get('divergent_tokens')} differ"
        for name, helper in document["helpers"].items()
        if helper.get("divergent_tokens")
    ]
    wrong += [
        f"capture of {made['helper']}: {made['changed_logprobs']} changed, {len(made['findings'])} findings"
        for made in document["captures"]
        if made["changed_logprobs"] or made["findings"]
    ]
    return wrong or [f"errors: {document['errors']}"]


def says_clean(documents: Documents) -> str:
    document = documents["clean"]
    helpers = ", ".join(
        f"{name} {helper.get('divergent_tokens')} of {helper.get('tokens')} differ"
        for name, helper in document["helpers"].items()
    )
    changed = sum(made["changed_logprobs"] for made in document["captures"])
    compared = sum(made["compared_logprobs"] for made in document["captures"])
    findings = sum(len(made["findings"]) for made in document["captures"])
    return f"{helpers}; captures changed {changed} of {compared} logprobs, {findings} findings"


def cost_is_known(documents: Documents) -> list[str]:
    """Both back ends captured the same requests, at this width within the budget of bytes, and sglang's own
    helpers ran beside ours."""
    document = documents["clean"]
    wrong = is_clean(documents)
    size_bytes = {made["backend"]: made["bytes"] for made in document["captures"]}
    if not {"digest", "dumper"} <= size_bytes.keys():
        wrong.append("not both back ends captured")
    elif size_bytes["digest"] * _FEWER_BYTES >= size_bytes["dumper"]:
        wrong.append(f"digests are more than 1/{_FEWER_BYTES} of the dumper's bytes")
    if not document["stock"]:
        wrong.append("sglang's own helpers did not run")
    return wrong


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


def _finding(documents: Documents) -> dict[str, Any]:
    found = [finding for finding in documents["locate"]["findings"] if not finding["latent"]]
    return found[0] if found else {}


def says_located(documents: Documents) -> str:
    finding = _finding(documents)
    if not finding:
        return "no finding"
    document = documents["locate"]
    conditions = ", ".join(document["verdict"]["conditions"])
    helpers = "; ".join(f"{name} {status}" for name, status in document.get("statuses", {}).items())
    said = (
        f"{finding['grade']} {' | '.join(finding['kinds'])} {finding['module']} at {finding['phase']} row "
        f"{finding['positions']['first']}, condition {conditions} ({helpers})"
    )
    facts = [*document["verdict"]["evidence"], *finding["evidence"]]
    worth = ("constant_position", "tile", "experts_differ", "equal_m", "checkpoint_crossed", "window_crossed")
    return "; ".join([said, *(fact["text"].rstrip(".") for fact in facts if fact["code"] in worth)])


def attention_of_layer_0(documents: Documents) -> list[str]:
    finding = _finding(documents)
    wrong = []
    if finding.get("module") != "model.layers.0.self_attn.attn" or finding.get("kind") != "operator":
        wrong.append(f"origin {finding.get('kind')} {finding.get('module')}")
    if "batch_invariance" not in documents["locate"]["verdict"]["conditions"]:
        wrong.append(f"conditions {documents['locate']['verdict']['conditions']}")
    if documents["locate"]["capture"]["changed_logprobs"]:
        wrong.append(f"capture changed {documents['locate']['capture']['changed_logprobs']} logprobs")
    return wrong


def tile_edge(documents: Documents) -> list[str]:
    wrong = attention_of_layer_0(documents)
    finding = _finding(documents)
    if finding and finding["positions"]["first"] != _TILE:
        wrong.append(f"first row {finding['positions']['first']}, not {_TILE}")
    said = json.dumps(documents["locate"]["verdict"])
    if "tile" not in said:
        wrong.append("the verdict does not speak of a tile")
    if "state_restore" in finding.get("kinds", ()):
        wrong.append("the restore is accused")
    return wrong


def census_is_whole(documents: Documents) -> list[str]:
    """Every operator without a state was judged: whether one is named depends on the shapes."""
    operators = documents["census"]["operators"]
    judged = [entry for entry in operators if entry["status"] in ("invariant", "not_invariant")]
    wrong = [f"{entry['module']}: {entry['reason']}" for entry in operators if entry["status"] == "error"]
    if not judged:
        wrong.append("no operator was judged")
    if any("q_norm" in entry["module"] for entry in operators):
        wrong.append("the fused q/k norm is listed as a module")
    return wrong


def says_census(documents: Documents) -> str:
    by_class: dict[str, list[int]] = {}
    for entry in documents["census"]["operators"]:
        if entry["status"] == "not_invariant":
            by_class.setdefault(entry["module"].rpartition(".")[2], []).append(entry["first_M"])
    summary = documents["census"]["summary"]
    named = "; ".join(f"{name} from M {min(firsts)} ({len(firsts)})" for name, firsts in by_class.items())
    kept = f"{summary['invariant']} operators keep their bits with 1 to {documents['census']['rows']} rows"
    return f"{kept}; {summary['not_invariant']} do not{': ' * bool(named)}{named}"


def all_right(documents: Documents) -> list[str]:
    return _not_right(documents, lambda _: False)


def all_right_beside_the_window_kernel(documents: Documents) -> list[str]:
    """As `all_right`, but klbench may name attention too: FlashAttention-3 with a window is not
    batch-invariant by itself (window_kernel.py), so such an origin is true whatever was planted."""
    return _not_right(documents, _right_beside_attention)


def _not_right(documents: Documents, excused: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    document = documents["selftest"]
    entries = [*document["cases"], *document["clean"]]
    left = document["planned"] - len(entries)
    wrong = [
        f"{entry['fault']} {entry['answer']}"
        for entry in entries
        if entry["answer"] != "right"
        # Planted where it cannot fire, to see that said.
        and not (entry["answer"] == "did_not_fire" and entry.get("cannot_fire"))
        and not excused(entry)
    ]
    return [*wrong, f"{left} were not judged"] if left else wrong


_ATTENTION = re.compile(r"(model\.)?layers\.\d+\.self_attn\.attn")
_PLANTED = ("helpers", "layer", "position", "kind")
"""The marks that speak of what was planted alone."""


def _right_beside_attention(entry: Mapping[str, Any]) -> bool:
    """Whether all marks of the planted fault are right, its condition is among those named, and everything
    else that is accused is an attention operator."""
    if entry["answer"] not in ("wrong", "undecided") or "located" not in entry:
        return False
    marks, why = entry["marks"], entry["why"]
    if any(marks[name] not in ("right", "none") for name in _PLANTED) or marks["condition"] == "wrong":
        return False
    accused = why.partition("accused too: ")[2].partition(";")[0]
    named = [part.strip().partition(" at ")[0].split(" ", 1) for part in accused.split(", ") if part]
    return bool(named) and all(
        kind == "operator" and _ATTENTION.fullmatch(module) is not None for kind, module in named
    )


def not_the_restore(documents: Documents) -> list[str]:
    """An operator may differ, but slots that were evicted or translated are no wrong restore."""
    found = [finding for finding in documents["locate"]["findings"] if not finding["latent"]]
    wrong = [
        f"{finding['module']} could be {', '.join(finding['kinds'])}"
        for finding in found
        if finding["kind"] != "operator" or len(finding["kinds"]) > 1
    ]
    capture = documents["locate"]["capture"]
    if capture is not None and capture["changed_logprobs"]:
        wrong.append(f"capture changed {capture['changed_logprobs']} logprobs")
    return wrong


def says_selftest(documents: Documents) -> str:
    counts: dict[str, int] = {}
    for entry in documents["selftest"]["cases"]:
        counts[entry["answer"]] = counts.get(entry["answer"], 0) + 1
    return ", ".join(f"{count} {answer.replace('_', ' ')}" for answer, count in sorted(counts.items()))


def has_an_origin(documents: Documents) -> list[str]:
    conditions = documents["locate"]["verdict"]["conditions"]
    wrong = [] if _finding(documents) else ["no origin"]
    return wrong if "batch_invariance" in conditions else [*wrong, f"conditions {conditions}"]


def probe_found(documents: Documents) -> list[str]:
    """The attention of layer 0 differs from the first decoded row on: layer 1 stores what follows from it."""
    document = documents["probe"]
    found = [finding for finding in document["findings"] if not finding["latent"]]
    wrong = [] if document["graphs"] else ["the server replays no graphs"]
    if document["capture"]["changed_logprobs"]:
        wrong.append(f"looking changed {document['capture']['changed_logprobs']} logprobs")
    if not found:
        return [*wrong, "nothing was found"]
    if found[0]["layer"] != 1 or found[0]["positions"]["first"] != document["first_row"]:
        wrong.append(f"layer {found[0]['layer']} at row {found[0]['positions']['first']}")
    return wrong


def says_probe(documents: Documents) -> str:
    document = documents["probe"]
    found = [finding for finding in document["findings"] if not finding["latent"]]
    what = "nothing found"
    if found:
        row = found[0]["positions"]["first"]
        what = f"{found[0]['grade']} {' or '.join(found[0]['kinds'])} {found[0]['module']} at row {row}"
    return f"graphs {document['graphs']}: {what}"


def were_made(documents: Documents) -> list[str]:
    return [
        f"{made['name']}: {made['text']}"
        for made in documents["experiment"]["experiments"]
        if made["outcome"] in ("not_possible", "not_comparable", "no_effect")
    ]


def says_experiments(documents: Documents) -> str:
    return "; ".join(f"{made['name']} {made['outcome']}" for made in documents["experiment"]["experiments"])
