"""The table of the GPU list, from the folders that `tests.gpu.run` left.

    $ python -m tests.gpu.table /tmp/rows --date 2026-11-29 --faults faults.md > table.md

Several folders may be given: of a row that was run twice the later folder's result is taken. Rows without a
result read "not run".
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.judgement import in_words
from tests.gpu.rows import ROWS
from tests.gpu.run import judged

_DOCUMENTS = ("clean", "run", "locate", "census", "experiment", "selftest", "probe")

_HEAD = """# klbench on a GPU

{date}, {gpus}, driver {driver}, sglang {sglang}, torch {torch}; klbench {commit}.
Models: random weights, 12 layers of width 1024, heads of 128, a vocabulary of 32,000
([models.py](../models.py)); 32 prompts of 300 to 900 tokens and 128 new tokens unless said; CUDA graphs off
where operators are captured. Several servers shared the machine, so seconds are upper bounds.

Each row is run by its name, `box.sh rows NAME`, on a box that [box.sh](../box.sh) describes.
"right": what klbench said is what is known to be true ([truth.py](../truth.py) and
[truth_of_origins.py](../truth_of_origins.py) say what each row looks at); "wrong": something contradicts it
(NOT ...); "undecided": something is left open (OPEN ...). "not run" means just that.

| list | row | what | answer | what klbench said |
|---|---|---|---|---|
"""


def results_of(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What the documents of the latest folder that has any say of each row; a row that was cut has none."""
    found: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        for folder in folders:
            if any(path.stem in _DOCUMENTS for path in (folder / row.name).glob("*.json")):
                found[row.name] = judged(row, folder / row.name) | {"commit": _commit(folder / row.name)}
    return found


def _commit(folder: Path) -> str:
    try:
        commit: str = json.loads((folder / "row.json").read_text())["commit"]
    except (OSError, ValueError, KeyError):
        return ""
    return commit


def commits_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The commit that all rows were made on, or which rows were made on which."""
    rows: dict[str, list[str]] = {}
    for name, result in results.items():
        rows.setdefault(result["commit"][:7] or "of an unknown commit", []).append(name)
    if len(rows) == 1:
        return f"{next(iter(rows))} for all rows"
    return "; ".join(f"{commit} for {', '.join(names)}" for commit, names in rows.items())


def _server(folders: Sequence[Path]) -> Mapping[str, Any]:
    for folder in reversed(folders):
        for path in sorted(folder.glob("*/locate.json")):
            server: Mapping[str, Any] = json.loads(path.read_text())["server"]
            if server and server.get("gpus"):
                return server
    raise SystemExit("no row says which server it had")


def cases_of(folders: Sequence[Path], model: str) -> list[dict[str, Any]]:
    """The latest result of each planted fault on a model."""
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"faults-{model}*/selftest.json")):
            for case in json.loads(path.read_text())["cases"]:
                if case["answer"] != "error" or (case["configuration"], case["fault"]) not in cases:
                    cases[case["configuration"], case["fault"]] = case
    return list(cases.values())


def faults(folders: Sequence[Path]) -> list[str]:
    """The accuracy of the answers on planted faults: a line a model, then a line a fault."""
    lines = [
        "| model | cases | right | undecided | wrong | did not fire | error |",
        "|---|---|---|---|---|---|---|",
    ]
    each = ["| model | fault | answer | first finding | why |", "|---|---|---|---|---|"]
    for model in ("dense", "moe", "swa", "hybrid"):
        cases = cases_of(folders, model)
        counts = dict.fromkeys(("right", "undecided", "wrong", "did_not_fire", "error"), 0)
        for case in cases:
            counts[case["answer"]] += 1
            located = case.get("located") or []
            first = "–"
            if located:
                at = located[0]["positions"]["first"]
                first = f"{' or '.join(located[0]['kinds'])} {located[0]['module']} at row {at}"
            answer = case["answer"].replace("_", " ")
            each.append(f"| {model} | {case['fault']} | {answer} | {first} | {case['why']} |")
        lines.append(f"| {model} | {len(cases)} | {' | '.join(map(str, counts.values()))} |")
    return [*lines, "", *each]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the table of the GPU list.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--date", required=True)
    parser.add_argument("--notes", type=Path, metavar="FILE", help="what stands below the table")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="write the planted faults there")
    arguments = parser.parse_args()
    server = _server(arguments.folders)
    results = results_of(arguments.folders)
    head = _HEAD.format(
        date=arguments.date,
        gpus=", ".join(server["gpus"]),
        driver=server["driver"],
        sglang=server["sglang_version"],
        torch=server["torch"],
        commit=commits_of(results),
    )
    print(head, end="")
    for row in ROWS:
        result = results.get(row.name, {"answer": "not_run", "said": "", "wrong": []})
        answer, said = result["answer"].replace("_", " "), in_words(result)
        print(f"| {row.number} | {row.name} | {row.what} | {answer} | {said.replace('|', 'or')} |")
    if arguments.notes is not None:
        print(arguments.notes.read_text(), end="")
    if arguments.faults is not None:
        text = "\n".join(["# Planted faults with real kernels", "", *faults(arguments.folders), ""])
        arguments.faults.write_text(text)


if __name__ == "__main__":
    main()
