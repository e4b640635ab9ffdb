"""The confusion table of a klbench.selftest/1 document: what was right, and how often nothing could be said.

    model   cases  condition  confirmed  helpers  operator  layer  position  kind   undecided  ...
    dense   33     33/33      31/33      33/33    33/33     31/31  33/33     33/33  0

Invariants: a number is of the cases that were asked for it and whose truth has a rule for it; those without a
rule are named; nothing that was not run counts as right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from klbench.core.accuracy import ANSWERS, MARKS
from klbench.core.text import counted

NAMES = (
    *("cases", "condition", "confirmed", "helpers", "operator", "layer", "position", "kind"),
    *("undecided", "did not fire", "wrong or error"),
)

Case = Mapping[str, Any]


def summary(cases: Sequence[Case], clean: Sequence[Case]) -> dict[str, Any]:
    """The `summary` object: counts by answer and by mark, and the false accusations.

    `could_not_fire` are those that `did_not_fire` because they cannot, and were planted to see that said.
    """
    counts = {answer: sum(case["answer"] == answer for case in cases) for answer in ANSWERS}
    marks = {
        name: {
            mark: sum(case["marks"].get(name) == mark for case in cases)
            for mark in ("right", "undecided", "wrong", "no_rule")
        }
        for name in MARKS
    }
    return {
        "cases": len(cases),
        "answers": counts,
        "marks": marks,
        "confirmed": sum(map(_confirmed, cases)),
        "could_not_fire": sum(map(_as_it_must, cases)),
        "clean_configurations": len(clean),
        "false_accusations": sum(case["answer"] == "wrong" for case in clean),
        "clean_without_answer": sum(case["answer"] not in ("right", "wrong") for case in clean),
    }


def rows(cases: Sequence[Case], by: str) -> list[list[str]]:
    """One row for each value of `by` (model, family, configuration, fault), and one for all."""
    values = list(dict.fromkeys(str(case[by]) for case in cases))
    table = [[value, *_cells([case for case in cases if case[by] == value])] for value in values]
    return [*table, ["all", *_cells(cases)]] if len(values) > 1 else table


def _cells(cases: Sequence[Case]) -> list[str]:
    counts = {answer: sum(case["answer"] == answer for case in cases) for answer in ANSWERS}
    shares = {name: _share(cases, name) for name in MARKS}
    asked = [case for case in cases if case["marks"].get("condition", "none") != "none"]
    confirmed = f"{sum(map(_confirmed, asked))}/{len(asked)}" if asked else "–"
    return [
        str(len(cases)),
        shares["condition"],
        confirmed,
        *(shares[name] for name in MARKS if name != "condition"),
        str(counts["undecided"]),
        str(counts["did_not_fire"]),
        str(counts["wrong"] + counts["error"]),
    ]


def _share(cases: Iterable[Case], name: str) -> str:
    given = [mark for case in cases if (mark := case["marks"].get(name, "none")) not in ("none", "no_rule")]
    return f"{given.count('right')}/{len(given)}" if given else "–"


def without_rule(cases: Sequence[Case]) -> list[str]:
    """`position: 10 cases (batch-scale, race)` for each mark that the truth of some cases has no rule for."""
    lines = []
    for name in MARKS:
        faults = [
            str(case["fault"]).partition(":")[0] for case in cases if case["marks"].get(name) == "no_rule"
        ]
        if faults:
            lines.append(f"{name}: {counted(len(faults), 'case')} ({', '.join(dict.fromkeys(faults))})")
    return lines


def _confirmed(case: Case) -> bool:
    return case["marks"].get("condition") == "right" and case.get("grade") == "confirmed"


def _as_it_must(case: Case) -> bool:
    """Whether it was planted where it cannot fire, and did not."""
    return case["answer"] == "did_not_fire" and bool(case.get("cannot_fire"))


def not_right(cases: Sequence[Case], clean: Sequence[Case]) -> list[str]:
    """One sentence for each case that is not right."""
    lines = []
    for case in (*cases, *clean):
        if case["answer"] == "right" or _as_it_must(case):
            continue
        what = " · ".join(str(case[name]) for name in ("model", "configuration", "workload", "fault"))
        said = str(case["answer"]).replace("_", " ")
        if case.get("deciding"):
            said += f" (would decide it: {', '.join(case['deciding'])})"
        lines.append(f"{what}: {said}: {case['why'] or 'no reason given'}")
    return lines


def combined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several selftests of the same code, as of one model each. Raises ValueError."""
    first = documents[0]
    for document in documents[1:]:
        if document["code_sha256"] != first["code_sha256"]:
            raise ValueError("the selftests were made with different code: make them again with the same")
        if document["made"] | {"date": ""} != first["made"] | {"date": ""}:
            raise ValueError("the selftests were made on different machines or with different versions")
    dates = sorted({document["made"]["date"] for document in documents})
    whole = dict(first)
    whole["made"] = first["made"] | {"date": " to ".join(dict.fromkeys((dates[0], dates[-1])))}
    for name in ("cases", "clean"):
        whole[name] = [entry for document in documents for entry in document[name]]
    for name in ("planned", "elapsed_s"):
        whole[name] = sum(document[name] for document in documents)
    return whole


def markdown(document: Mapping[str, Any]) -> list[str]:
    """The tables for a README, with date, versions and machine."""
    cases, clean, made = document["cases"], document["clean"], document["made"]
    sums = summary(cases, clean)
    faults = len({case["fault"].partition(":")[0] for case in cases})
    models = list(dict.fromkeys(case["model"] for case in cases))
    done = len(cases) + len(clean)
    unfinished = ""
    if done < document["planned"]:
        unfinished = f"; ended early, with {done} of {document['planned']} results"
    lines = [
        f"`klbench selftest --{document['options']['extent']}`, {made['date']}: klbench "
        f"{made['klbench_version']}, sglang {made['sglang_version']}, torch {made['torch']}, "
        f"{made['machine']}; {len(cases)} cases of {faults} faults on {len(models)} models "
        f"({', '.join(models)}), {document['elapsed_s'] / 60:.0f} minutes{unfinished}.",
        "",
        *_markdown_table("model", rows(cases, "model")),
        "",
        *_markdown_table("family", rows(cases, "family")),
        "",
        *_markdown_table("configuration", rows(cases, "configuration")),
        "",
        *_markdown_table("workload", rows(cases, "workload")),
        "",
        *_no_rule(cases),
        *_could_not_fire(sums["could_not_fire"]),
        f"Clean servers: {sums['clean_configurations']} configurations, "
        f"{sums['false_accusations']} false accusations"
        + (f", {sums['clean_without_answer']} without an answer." if sums["clean_without_answer"] else "."),
    ]
    if open_cases := not_right(cases, clean):
        lines += ["", "Not right:", "", *(f"- {line}" for line in open_cases)]
    return lines


def _no_rule(cases: Sequence[Case]) -> list[str]:
    lines = without_rule(cases)
    if not lines:
        return []
    said = "Not counted, because the truth has no rule for it and any answer would do: "
    return [said + "; ".join(lines) + ".", ""]


def _could_not_fire(count: int) -> list[str]:
    if not count:
        return []
    return [f"Planted where they cannot fire, and said not to have fired: {count}.", ""]


def _markdown_table(first: str, table: Sequence[Sequence[str]]) -> list[str]:
    head = [first, *NAMES]
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(["---", *["--:"] * len(NAMES)]) + "|",
        *("| " + " | ".join(row) + " |" for row in table),
    ]
