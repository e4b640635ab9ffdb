"""Two sessions side by side: the same prompts before and after a change of sglang's code.

    klbench.compare/1: {"before", "after", "differs", "verdict", "code", "differing", "helpers": {...}}

What would make the numbers incomparable refuses, by name. Three kinds of differing keys: `identity` (another
experiment, never compared), `settings` (compared only when the user insists), `code` (what a comparison is
for, always named).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.core.before_after import HelperChange, compare_columns
from klbench.core.columns import HELPERS
from klbench.engine.checkout import commits_between, files_between
from klbench.errors import ExitCode, KlbenchError, UndecidedError
from klbench.session.bundle import is_unpacked
from klbench.session.columns import load_columns
from klbench.session.documents import helper_object, iso_time
from klbench.session.folder import SessionFolder
from klbench.session.snapshot import CodeState, HelperState, RunState, ServerState
from klbench.session.state import SessionState

SCHEMA = "klbench.compare/1"

_SETTINGS = (
    "dtype", "kv_cache_dtype", "quantization", "device", "gpus", "driver", "cuda", "torch",
    "attention_backend", "deterministic", "radix_cache", "page_size", "chunked_prefill_size", "tp_size",
    "dp_size", "pp_size", "nnodes", "dp_attention", "cuda_graphs", "overlap", "speculative", "sliding_window",
    "preferred_sampling_params",
)  # fmt: skip
_CODE = ("sglang_version", "git_commit", "git_dirty", "sglang_path")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its latest run that measured something, on the server that it ran on."""

    folder: SessionFolder
    run: RunState
    server: ServerState
    klbench_version: str


@dataclass(frozen=True, slots=True)
class Differing:
    """Keys that are not the same, as {key: [before, after]}."""

    identity: dict[str, list[Any]]
    settings: dict[str, list[Any]]
    code: dict[str, list[Any]]


def side_of(folder: SessionFolder, state: SessionState, number: int | None = None) -> Side:
    """The run of a session to compare. Raises UndecidedError where nothing was measured."""
    for run in reversed(state.runs):
        if number in (None, run.number) and any(helper.columns for helper in run.helpers):
            return Side(folder, run, run.server or state.server, state.runner.klbench_version)
    raise UndecidedError(
        f"{folder.name} holds no {'measured run' if number is None else f'measured run {number}'}",
        next=f"klbench open {folder.path} shows what it holds",
    )


def differing(before: Side, after: Side) -> Differing:
    """What is not the same in the two, by how much it matters."""
    one, two = before.server.facts, after.server.facts
    identity = _differences(
        {
            "prompts": (before.run.prompts.get("sha256"), after.run.prompts.get("sha256")),
            "model": (_name(one.get("model")), _name(two.get("model"))),
            "architectures": (one.get("architectures"), two.get("architectures")),
            "vocab_size": (one.get("vocab_size"), two.get("vocab_size")),
            "max_new_tokens": (
                before.run.options.get("max_new_tokens"),
                after.run.options.get("max_new_tokens"),
            ),
        }
    )
    settings = _differences({name: (one.get(name), two.get(name)) for name in _SETTINGS})
    knobs = _mapping(one.get("numerics_env")), _mapping(two.get("numerics_env"))
    settings |= _differences(
        {
            f"numerics_env.{name}": (knobs[0].get(name), knobs[1].get(name))
            for name in {**knobs[0], **knobs[1]}
        }
    )
    code = _differences({name: (one.get(name), two.get(name)) for name in _CODE})
    code |= _differences(
        {
            "fault": (before.server.fault, after.server.fault),
            "klbench_version": (before.klbench_version, after.klbench_version),
        }
    )
    return Differing(identity, settings, code)


def _differences(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    return {name: [one, two] for name, (one, two) in pairs.items() if one != two}


def _name(path: object) -> object:
    # The same model lies elsewhere on another machine.
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else path


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def check_comparable(found: Differing, *, anyway: bool) -> None:
    """Raises UndecidedError that names the keys which keep the two from being compared."""
    if found.identity:
        raise UndecidedError(
            f"these sessions cannot be compared: {', '.join(found.identity)} differ",
            why=_shown(found.identity),
            next="klbench run --like SESSION repeats a session's prompts, model and helpers",
        )
    if found.settings and not anyway:
        raise UndecidedError(
            f"these sessions ran under other settings: {', '.join(found.settings)} differ",
            why=_shown(found.settings),
            next="a change would not be the code's alone; compare them all the same with --anyway",
        )


def _shown(keys: Mapping[str, list[Any]]) -> str:
    return "; ".join(f"{name}: {_short(one)} → {_short(two)}" for name, (one, two) in keys.items())


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


async def compare(before: Side, after: Side, *, anyway: bool = False) -> dict[str, Any]:
    """The klbench.compare/1 document. Raises UndecidedError where the two cannot be compared."""
    found = differing(before, after)
    check_comparable(found, anyway=anyway)
    helpers = await asyncio.to_thread(_helpers, before, after)
    return {
        "schema": SCHEMA,
        "before": _side(before),
        "after": _side(after),
        "differs": any(part["differs"] for part in helpers.values()),
        "verdict": verdict(helpers),
        "code": await code_change(
            before.server.code, after.server.code, is_here=not is_unpacked(after.folder)
        ),
        "differing": found.settings | found.code,
        "helpers": helpers,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "session": str(side.folder.path),
        "run": side.run.number,
        "started_at": iso_time(side.run.started_at),
        "server": dict(side.server.facts),
        "prompts": dict(side.run.prompts),
    }


def _helpers(before: Side, after: Side) -> dict[str, Any]:
    compared: dict[str, Any] = {}
    for name in HELPERS:
        one, two = before.run.helper(name), after.run.helper(name)
        if one is not None or two is not None:
            compared[name] = _helper(before.folder, one, after.folder, two)
    return compared


def _helper(
    folder_before: SessionFolder,
    before: HelperState | None,
    folder_after: SessionFolder,
    after: HelperState | None,
) -> dict[str, Any]:
    """One helper: its numbers in both, and what changed in its tokens where both have them."""
    change, reason = None, None
    try:
        if before is None or after is None or before.columns is None or after.columns is None:
            reason = "it was not measured in both"
        else:
            change = compare_columns(
                load_columns(folder_before.resolve(before.columns)),
                load_columns(folder_after.resolve(after.columns)),
            )
    except KlbenchError as error:
        reason = f"{error.what}: {error.why}"
    except ValueError as error:
        reason = str(error)
    numbers = [_numbers(part) for part in (before, after)]
    differs = numbers[0]["status"] != numbers[1]["status"]
    return {
        "before": numbers[0],
        "after": numbers[1],
        "differs": differs or change is None or change.differs,
        "direction": direction(change) if change is not None else "undecided",
        "reason": reason,
        "change": change.as_dict() if change is not None else None,
    }


def exit_code(document: Mapping[str, Any]) -> ExitCode:
    """1 where a helper's status or bits are others, 5 where one could not be compared and none is known to
    differ."""
    parts = document["helpers"].values()
    if any(part["before"]["status"] != part["after"]["status"] for part in parts):
        return ExitCode.DIVERGED
    directions = {str(part["direction"]) for part in parts}
    if directions - {"same", "undecided"}:
        return ExitCode.DIVERGED
    return ExitCode.UNDECIDED if "undecided" in directions else ExitCode.CONSISTENT


def _numbers(helper: HelperState | None) -> dict[str, Any]:
    names = (
        "status", "requests", "hits", "dropped", "tokens", "divergent_tokens", "avg_kl_div",
        "max_abs_dlogprob",
    )  # fmt: skip
    result = helper_object(helper) if helper is not None else {"status": "not_run"}
    return {name: result.get(name) for name in names}


def direction(change: HelperChange) -> str:
    """better, worse, mixed, same, or other: logprobs moved though no divergence came or went."""
    if change.fixed and change.introduced:
        return "mixed"
    if change.fixed:
        return "better"
    if change.introduced:
        return "worse"
    return "other" if change.differs else "same"


def verdict(helpers: Mapping[str, Mapping[str, Any]]) -> str:
    """The helpers' directions together."""
    directions = {str(part["direction"]) for part in helpers.values()}
    if "mixed" in directions or {"better", "worse"} <= directions:
        return "mixed"
    for word in ("worse", "better", "undecided", "other"):
        if word in directions:
            return word
    return "same"


async def code_change(
    before: CodeState | None, after: CodeState | None, *, is_here: bool = True
) -> dict[str, Any] | None:
    """What changed in sglang's checkout: commits and files; None where one of the two is no checkout.

    `is_here`: the later one lies on this machine, and git may be asked in it; not so where a bundle names it.
    """
    if before is None or after is None:
        return None
    root = Path(after.root)
    commits: list[str] | None = []
    files: list[str] | None = []
    removed: list[str] | None = []
    if before.commit != after.commit and not is_here:
        commits = files = removed = None
    elif before.commit != after.commit:
        commits = await commits_between(root, before.commit, after.commit)
        removed = await commits_between(root, after.commit, before.commit)
        files = await files_between(root, before.commit, after.commit)
    edited = [
        name
        for name in {**before.changed, **after.changed}
        if before.changed.get(name) != after.changed.get(name)
    ]
    return {
        "root": after.root,
        "before": {"commit": before.commit, "subject": before.subject, "edited": sorted(before.changed)},
        "after": {"commit": after.commit, "subject": after.subject, "edited": sorted(after.changed)},
        "commits": commits,
        "commits_removed": removed,
        "changed_files": sorted({*(files or []), *edited}),
        "files_known": files is not None,
    }
