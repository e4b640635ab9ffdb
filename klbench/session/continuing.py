"""What an interrupted run keeps and what of it is repeated.

Invariants: what a run has is never measured again; of the helper in flight only the scoring may be left, when
its generation arm is on disk and the server is the same in everything that changes numbers; otherwise the
helper is repeated whole, the warming arm first, for the cache went with the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from klbench.core.columns import ArmName, HelperName
from klbench.engine.generation_arm import GenerationArm
from klbench.engine.prompts import PromptSet, read_prompt_file
from klbench.errors import KlbenchError, UndecidedError, UsageError
from klbench.session.arm_file import arm_file, load_arm
from klbench.session.folder import SessionFolder, write_atomically
from klbench.session.interruption import Interrupted
from klbench.session.request import StartRequest
from klbench.session.state import RunState, SessionState

MAX_PROMPTS = 65536

# What may change between two starts of the same server without changing a number.
_NOT_NUMBERS = ("python", "decode_log_interval", "max_total_tokens", "context_length")

_TARGET = ("kind", "model", "model_path", "url", "arguments")
_MEASURED_BY = (
    "samples", "max_new_tokens", "prompt_tokens", "prompts", "seed", "threshold", "deterministic", "fault",
)  # fmt: skip


def continues(start: StartRequest, found: Interrupted, state: SessionState) -> str | None:
    """Why the request is another experiment than the interrupted run, None where it is the same."""
    target, options = start.as_shown()
    before = state.runner.target
    differing = [name for name in _TARGET if (target.get(name) or None) != (before.get(name) or None)]
    measured = found.run.options
    differing += [name for name in _MEASURED_BY if name in measured and options.get(name) != measured[name]]
    helpers = options.get("helpers") or []
    if helpers and set(helpers) != {helper.helper for helper in found.run.helpers}:
        differing.append("helpers")
    return ", ".join(differing) or None


def differing_facts(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """The names of the server facts that change numbers and are not the same."""
    names = [*one, *(name for name in two if name not in one)]
    return [name for name in names if name not in _NOT_NUMBERS and one.get(name) != two.get(name)]


def saved_generation(
    folder: SessionFolder, run: RunState, helper: HelperName, facts: Mapping[str, Any]
) -> tuple[GenerationArm | None, list[str]]:
    """The generation arm that need not be repeated, and else the names of the facts that forbid it."""
    try:
        saved = load_arm(folder.resolve(folder.relative(arm_file(folder.runs, run.number, helper))))
    except UsageError:
        return None, []
    if saved is None or saved.prompts_sha256 != run.prompts.get("sha256"):
        return None, []
    differing = differing_facts(saved.made_on, facts)
    return (None, differing) if differing else (saved.arm, [])


def kept_arms(helper: HelperName) -> list[ArmName]:
    """The arms that a saved generation arm stands for."""
    return ["generation"] if helper == "match" else ["warming", "generation"]


# The prompts of a run, as a file that --prompts takes.


def save_prompts(folder: SessionFolder, prompts: PromptSet) -> str:
    """Writes the prompts where they are not yet; returns the file relative to the session."""
    file = folder.runs / f"prompts-{prompts.sha256[:16]}.jsonl"
    if not file.exists():
        lines = [msgspec.json.encode({"input_ids": list(prompt)}) for prompt in prompts.prompts]
        write_atomically(file, b"\n".join(lines) + b"\n")
    return folder.relative(file)


def recorded_prompts(folder: SessionFolder, run: RunState) -> PromptSet | None:
    """The prompts of a recorded run, None where they were not kept. Raises UndecidedError for others than
    those that were measured."""
    file = recorded_prompts_file(folder, run)
    if file is None:
        return None
    entries = read_prompt_file(file, MAX_PROMPTS)
    prompts = tuple(tuple(entry) for entry in entries if isinstance(entry, list))
    found = PromptSet(str(run.prompts.get("source", "")), prompts)
    check_same_prompts(found, run)
    return found


def recorded_prompts_file(folder: SessionFolder, run: RunState) -> Path | None:
    if run.prompts_file is None:
        return None
    try:
        file = folder.resolve(run.prompts_file)
    except KlbenchError:
        return None
    return file if file.is_file() else None


def check_same_prompts(prompts: PromptSet, run: RunState) -> None:
    """Raises UndecidedError unless these are the prompts of the run."""
    if prompts.sha256 != run.prompts.get("sha256"):
        raise UndecidedError(
            f"the prompts of run {run.number} cannot be repeated",
            why=f"now they hash to {prompts.sha256[:12]}, then to {str(run.prompts.get('sha256'))[:12]}",
            next="start a new run",
        )
