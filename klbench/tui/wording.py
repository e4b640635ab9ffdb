"""What the screens say about a session, as plain text: pure functions of the state, the window's width and
the time. Nothing here is drawn, so everything here can be tested without a terminal.

    klbench · qwen3-dense · cpu torch_native · deterministic · radix on · page 1
    ● ready · 32 prompts × 128 new · 3 of 3 helpers done in 0:17
    match              clean     cold 32/32   4096 tokens     0 differ  0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from klbench.core.columns import HELPERS
from klbench.core.text import (
    cache_hits,
    cell_width,
    counted,
    elapsed,
    fit,
    kl,
    magnitude,
    shortened,
    size,
    visible,
)
from klbench.core.verdict_words import verdict_in_words
from klbench.session.state import (
    HelperState,
    JobState,
    LocatedState,
    RunState,
    SessionState,
    TroubleLine,
)
from klbench.tui.actions import key_of

_PHASES = {
    "none": "no server yet",
    "starting": "starting the server",
    "importing": "importing",
    "loading_weights": "loading weights",
    "allocating": "allocating memory",
    "capturing_graphs": "capturing graphs",
    "warming_up": "warming up",
    "ready": "ready",
    "stopping": "stopping the server",
    "stopped": "stopped",
    "failed": "server failed",
}
_STATUS = {
    "clean": "clean",
    "diverged": "DIVERGED",
    "not_run": "not run",
    "inconclusive": "unclear",
    "error": "ERROR",
    "stopped": "stopped",
    "waiting": "waiting",
    "running": "running",
}
TONES = {"diverged": "strong", "error": "warn", "inconclusive": "strong", "waiting": "dim", "not_run": "dim"}


def title(state: SessionState, session: str, width: int) -> str:
    """Where am I: the model, the machine, what is in force; the session's name where there is room."""
    facts, target = state.server.facts, state.runner.target
    parts = ["klbench", _model(facts, target)]
    if state.server.fault:
        parts.append(f"fault {state.server.fault.partition(':')[0]}")
    if facts:
        parts += [_machine(facts), "deterministic" if facts.get("deterministic") else "NOT deterministic"]
        parts.append("radix on" if facts.get("radix_cache") else "radix OFF")
        parts.append(f"page {facts.get('page_size', '?')}")
        if width >= 140:
            parts += [f"tp {facts.get('tp_size', 1)}", f"sglang {_sglang(facts)}"]
    elif target:
        parts.append(_target(target))
    left = " " + " · ".join(visible(part) for part in parts if part)
    right = f"session {visible(session)}" if session and width >= 120 else ""
    room = width - cell_width(right) - (2 if right else 0)
    return fit(shortened(left, room, more=" · …"), room) + (f"  {right}" if right else "")


def status(state: SessionState, width: int, *, live: bool, mark: str, now: float) -> str:
    """What is it doing: server, run, job, each with its time. `mark`: why this terminal commands nothing.

    Where that is too long what was asked for goes first, then the words at the end, each as a whole.
    """
    server = state.server
    phase = _PHASES.get(server.phase, server.phase.replace("_", " "))
    if server.phase in ("none", "stopped", "ready"):
        parts = [f"{'●' if server.ready else '○'} {phase}"]
    elif server.phase == "failed":
        parts = [f"✗ {phase}"]
    else:
        parts = [f"◌ {phase} {elapsed(_since_launch(state, now))}"]
    asked = ""
    if (run := state.run) is not None:
        asked = _asked(run)
        parts += [asked, *_run_words(run, now)]
    if state.job is not None and state.job.kind not in ("run", "launch"):
        parts.append(job(state.job, now))
    if not live and state.seq:
        parts.append(mark or "finished session")
    elif mark:
        # First, for what does not fit is left out at the end.
        parts.insert(0, mark)
    text = _in_one_line(parts)
    if cell_width(text) > width and asked:
        text = _in_one_line(part for part in parts if part != asked)
    while cell_width(text) > width and (end := max(text.rfind(", "), text.rfind(" · "))) > 0:
        text = text[:end]
    return fit(text, width).rstrip()


def _in_one_line(parts: Iterable[str]) -> str:
    return " " + " · ".join(visible(part) for part in parts if part)


def job(job: JobState, now: float) -> str:
    """`locate: capturing, 12 of 40, 0:25 left`."""
    words = [job.kind + (f": {job.phase}" if job.phase else "")]
    if job.total:
        words.append(f"{job.done} of {job.total}")
    words.append(elapsed(max(now - job.started_at, 0)))
    if job.eta_s is not None:
        words.append(f"{elapsed(job.eta_s)} left")
    return ", ".join(words)


def helper_line(helper: HelperState, now: float, width: int) -> str:
    """One line of the helpers' pane under `helper_heading`; what does not fit is left out from the right."""
    name = fit(helper.helper, _HELPER_CELLS[0])
    shown = fit(_STATUS.get(helper.status, helper.status), _HELPER_CELLS[1])
    result = helper.result
    if result is None:
        return f"{name}  {shown}  {_arm_words(helper, now)}".rstrip()
    if helper.status in ("not_run", "error") or not result.get("tokens"):
        return f"{name}  {shown}  {result.get('reason') or 'nothing was compared'}"
    nan, equal = int(result.get("nan_count") or 0), result.get("bit_equal_fraction")
    extra = [f"{nan} NaN"] if nan else []
    extra += [f"{result['dropped']} dropped"] if result.get("dropped") else []
    extra += [f"{len(lost)} lost"] if isinstance(lost := result.get("lost"), list) and lost else []
    cells = (
        cache_hits(helper.helper, int(result.get("hits") or 0), int(result.get("requests") or 0)),
        str(result["tokens"]),
        str(int(result.get("divergent_tokens") or 0)),
        kl(result.get("avg_kl_div")),
        magnitude(float(result.get("max_abs_dlogprob") or 0)),
        # What was left out must not be: it comes before the last column.
        *([] if equal is None or extra else [f"{float(equal):.1%}"]),
    )
    line = "  ".join([name, shown, *_cells(cells)])
    return _as_fits([line[: _fitting(width)], *extra], width)


_HELPER_CELLS = (17, 8, 11, 7, 6, 7, 7, 9)
_HELPER_HEADS = ("helper", "status", "hits", "tokens", "differ", "avg KL", "max |Δ|", "bit-equal")


def helper_heading(width: int) -> str:
    """The heads of the helpers' columns, as many as `helper_line` shows in `width` cells."""
    name, status, *rest = _HELPER_HEADS
    heads = [fit(name, _HELPER_CELLS[0]), fit(status, _HELPER_CELLS[1]), *_cells(rest)]
    return "  ".join(heads)[: _fitting(width)].rstrip()


def _cells(words: Sequence[str]) -> list[str]:
    """Words under the heads from the third on; numbers stand on the right."""
    return [
        fit(word, width, right=index > 0)
        for index, (word, width) in enumerate(zip(words, _HELPER_CELLS[2:], strict=False))
    ]


def _fitting(width: int) -> int:
    """The cells that the whole columns within `width` take."""
    taken = 0
    for cells in _HELPER_CELLS:
        step = cells + (2 if taken else 0)
        if taken + step > width:
            break
        taken += step
    return taken


def _as_fits(words: Sequence[str], width: int) -> str:
    line, *rest = words
    for word in rest:
        if cell_width(line) + 2 + cell_width(word) <= width:
            line += f"  {word}"
    return line.rstrip()


def sentences(
    state: SessionState,
    *,
    live: bool,
    now: float,
    todo: str = "",
    located: LocatedState | None = None,
    both: bool = True,
) -> list[str]:
    """What to know and what to do next: question, trouble, verdict or progress, the first that there is.

    `todo` is the next step in words (next_step.py), `located` the origin of the request under the cursor;
    unless `both`, the origin stands in the place of the next step.
    """
    then = [f"Next: {todo}"] if todo else []
    if state.question is not None:
        return [
            state.question.what,
            state.question.why,
            f"Press {key_of('agree')} to agree, {key_of('cancel')} to cancel.",
        ]
    fresh = fresh_trouble(state)
    if fresh is not None:
        return trouble(fresh)
    run = state.run
    if state.server.phase == "failed":
        return [*_server_failed(state), *then]
    if run is not None and run.cancelled:
        return ["The run was cancelled; what it measured is kept.", *then]
    if run is not None and run.verdict is not None:
        return verdict_sentences(run.verdict, then if both or located is None else (), located)
    if run is not None and not (state.job is not None and (live or todo.startswith("wait, "))):
        return ["The run did not end: what it measured is kept.", *then]
    if run is not None:
        return _running(run, now)
    if state.server.ready:
        waiting = "The server is ready; the helpers start next." if live else "Nothing was measured."
        return [waiting, *(then if state.job is None else ())]
    if state.seq == 0:
        return ["Waiting for the runner's first word."]
    if not live:
        ended = [state.runner.ended] if state.runner.ended else []
        return ["No runner works on this session.", *ended, *then]
    if launching(state):
        return ["The server is being launched; the helpers follow by themselves."]
    return [f"{_PHASES.get(state.server.phase, state.server.phase)}.".capitalize()]


def verdict_sentences(
    verdict: Mapping[str, Any], then: Sequence[str], located: LocatedState | None = None
) -> list[str]:
    """The first piece of evidence, the conditions with the grade, the origin where it is known, and `then`,
    the next step."""
    lines = []
    evidence, grade = _texts(verdict.get("evidence")), str(verdict.get("grade") or "unknown")
    if evidence:
        lines.append(_sentence(evidence[0]))
    said = verdict_in_words(verdict)
    none = verdict.get("status") == "none"
    lines.append(f"No divergence · {grade}" if none else said[0].upper() + said[1:])
    if none and (steps := _texts(verdict.get("next"))):
        lines.append(f"Open: {steps[0]}")
    if located is not None:
        findings = located.result.get("findings")
        first = findings[0] if isinstance(findings, list) and findings else None
        where = (
            f"{first.get('module')} ({first.get('grade')})" if isinstance(first, Mapping) else "none found"
        )
        lines.append(f"Origin of request {located.request}: {where} · press {key_of('locate')}")
    return [*lines, *then]


def trouble(line: TroubleLine) -> list[str]:
    """What happened, why, what to do next."""
    mark = "✗" if line.level == "error" else "!"
    return [
        f"{mark} {line.what}",
        *([line.why] if line.why else []),
        *([f"Next: {line.next}"] if line.next else []),
    ]


_MISSED = {
    "window_not_crossed": "the sliding window",
    "chunk_within_request": "a prompt in chunks",
    "checkpoint_not_crossed": "checkpoints",
    "no_restore": "restores",
    "page_not_filled": "restores of short prompts",
    "no_batch": "a batch",
    "no_graphs": "CUDA graphs",
}
"""What a run will miss, in a few words, by the code of core/exercised.py."""
_MEASURE = ("launch", "relaunch", "run")
"""Kinds of jobs whose failure leaves nothing to measure with, or nothing measured."""
LAUNCH = ("starting", "importing", "loading_weights", "allocating", "capturing_graphs", "warming_up")
"""Phases of a launch in their order."""


def launch_words(state: SessionState, log_lines: Sequence[str], now: float) -> list[str]:
    """How far a launch is: its phases, its time, the last launch's, the server's own last words."""
    server = state.server
    here = LAUNCH.index(server.phase) if server.phase in LAUNCH else 0
    lines = [
        f"{'✓' if place < here else '▸' if place == here else '·'} {_PHASES[phase]}"
        for place, phase in enumerate(LAUNCH)
    ]
    took = f", the last launch took {elapsed(server.launch_s)}" if server.launch_s else ""
    lines[here] += f"  {elapsed(max(now - server.phase_at, 0))}"
    return [f"Launching, {elapsed(_since_launch(state, now))}{took}", *lines, "", *log_lines[-2:]]


def launching(state: SessionState) -> bool:
    return state.server.phase in LAUNCH


def waiting_helpers() -> tuple[HelperState, ...]:
    """The three helpers before any run."""
    return tuple(HelperState(name) for name in HELPERS)


def size_words(size_bytes: object) -> str:
    """A size that an event gave, empty where it gave none."""
    return size(size_bytes) if isinstance(size_bytes, int | float) and size_bytes else ""


def _asked(run: RunState) -> str:
    """`32 prompts × 128 new`."""
    count, new = run.prompts.get("count"), run.options.get("max_new_tokens")
    return counted(count, "prompt") + (f" × {new} new" if new else "") if count else ""


def _run_words(run: RunState, now: float) -> Iterable[str]:
    done = sum(helper.result is not None for helper in run.helpers)
    if run.ended:
        word = "done, cancelled after" if run.cancelled else "done in"
        yield f"{done} of {counted(len(run.helpers), 'helper')} {word} {elapsed(run.elapsed_s or 0)}"
        return
    running = next((helper for helper in run.helpers if helper.status == "running"), None)
    if running is not None:
        yield f"{running.helper}: {_arm_words(running, now, short=True)}"


def _arm_words(helper: HelperState, now: float, *, short: bool = False) -> str:
    """`scoring  41 %  1234/4096  0:12  0:38 left`; empty before the first arm."""
    if helper.stopped or not helper.arms:
        return "its run ended before it did" if helper.stopped else ""
    arm = helper.arms[-1]
    between = ", " if short else "  "
    if arm.ended:
        return between.join([f"{arm.arm} arm", f"done in {elapsed(arm.elapsed_s)}"])
    words = [f"{arm.arm} arm" if short else arm.arm]
    if arm.total:
        words.append(f"{100 * arm.done // arm.total} %")
        words += [] if short else [f"{arm.done}/{arm.total}"]
    words.append(elapsed(max(arm.elapsed_s, now - arm.started_at)))
    if arm.eta_s is not None:
        words.append(f"{elapsed(arm.eta_s)} left")
    return between.join(words)


def _running(run: RunState, now: float) -> list[str]:
    running = next((helper for helper in run.helpers if helper.status == "running"), None)
    what = f"{running.helper}: {_arm_words(running, now, short=True)}" if running else "the helpers start"
    last = f"{key_of('cancel')} cancels; what is measured is kept."
    if run.will_miss:
        # Behind it, for the last statement stands alone in a low window.
        codes = [str(item.get("code")) for item in run.will_miss]
        names = ", ".join(_MISSED.get(code, code.replace("_", " ")) for code in codes)
        last += f" Will not be exercised: {names}; {key_of('verdict')} says what would."
    return [f"Measuring · {what}", "Each helper's table fills as soon as its arms have ended.", last]


def _server_failed(state: SessionState) -> list[str]:
    end = state.server.ended
    lines = ["✗ The server failed" + (f": {end.why}" if end and end.why else "")]
    if end is not None and end.last_lines:
        lines.append(f"its last words: {end.last_lines[-1]}")
    return lines


def fresh_trouble(state: SessionState) -> TroubleLine | None:
    """The latest error that concerns the whole session, as long as nothing was measured or located after it.

    A verdict stands whatever became of a command that looks further, such as a replay.
    """
    if not state.troubles:
        return None
    line = state.troubles[-1]
    if line.level != "error":
        return None
    job = state.job or state.last_job
    judged = state.run is not None and state.run.verdict is not None
    if judged and job is not None and job.kind not in _MEASURE and line.at >= job.started_at:
        return None
    later = [located.at for located in state.located] + [run.started_at for run in state.runs]
    return line if line.at >= max(later, default=0.0) else None


def _since_launch(state: SessionState, now: float) -> float:
    """Seconds in the launch: since its job began, or what the last event said."""
    if state.job is not None:
        return max(now - state.job.started_at, 0.0)
    return state.server.elapsed_s


def _model(facts: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    name = str(facts.get("model") or target.get("model_path") or "")
    if target.get("kind") == "demo":
        return f"{target.get('model') or 'dense'} demo"
    return name.rstrip("/").rsplit("/", 1)[-1] if name else ""


def _target(target: Mapping[str, Any]) -> str:
    return str(target.get("url") or "") if target.get("kind") == "url" else ""


def _machine(facts: Mapping[str, Any]) -> str:
    gpus = facts.get("gpus")
    device = str(facts.get("device") or "")
    if isinstance(gpus, list) and gpus:
        first = gpus[0]
        device = str(first.get("name", device)) if isinstance(first, Mapping) else str(first)
    return f"{device} {facts.get('attention_backend') or ''}".strip()


def _sglang(facts: Mapping[str, Any]) -> str:
    version, commit = str(facts.get("sglang_version") or "?"), str(facts.get("git_commit") or "")
    if not commit:
        return version
    return f"{version} ({commit[:7]}{' dirty' if facts.get('git_dirty') else ''})"


def _sentence(text: str) -> str:
    """Evidence as a sentence of its own."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _texts(items: object) -> list[str]:
    if not isinstance(items, list | tuple):
        return []
    return [str(item.get("text", "")) for item in items if isinstance(item, Mapping)]
