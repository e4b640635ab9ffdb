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
from klbench.core.text import cache_hits, cell_width, elapsed, fit, kl, size, visible
from klbench.session.state import (
    HelperState,
    JobState,
    LocatedState,
    RunState,
    SessionState,
    TroubleLine,
)

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
    return fit(left, room) + (f"  {right}" if right else "")


def status(state: SessionState, width: int, *, live: bool, readonly: bool, now: float) -> str:
    """What is it doing: server, run, job, each with its time."""
    server = state.server
    phase = _PHASES.get(server.phase, server.phase.replace("_", " "))
    if server.phase in ("none", "stopped", "ready"):
        parts = [f"{'●' if server.ready else '○'} {phase}"]
    elif server.phase == "failed":
        parts = [f"✗ {phase}"]
    else:
        parts = [f"◌ {phase} {elapsed(_since_launch(state, now))}"]
    if (run := state.run) is not None:
        parts += _run_words(run, now)
    if state.job is not None and state.job.kind not in ("run", "launch"):
        parts.append(job(state.job, now))
    if not live and state.seq:
        parts.append("finished session" if not readonly else "read-only")
    elif readonly:
        parts.append("read-only")
    return fit(" " + " · ".join(visible(part) for part in parts if part), width).rstrip()


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
    """One line of the helpers' pane; what does not fit into `width` cells is left out from the right."""
    name = fit(helper.helper, 17)
    shown = fit(_STATUS.get(helper.status, helper.status), 8)
    result = helper.result
    if result is None:
        return f"{name}  {shown}  {_arm_words(helper, now)}".rstrip()
    if helper.status in ("not_run", "error") or not result.get("tokens"):
        return f"{name}  {shown}  {result.get('reason') or 'nothing was compared'}"
    hits = cache_hits(helper.helper, int(result.get("hits") or 0), int(result.get("requests") or 0))
    differing = int(result.get("divergent_tokens") or 0)
    nan = int(result.get("nan_count") or 0)
    parts = [
        name, shown, fit(hits, 10), fit(f"{result['tokens']} tokens", 12, right=True),
        fit(f"{differing} differ", 12, right=True), fit(kl(result.get("avg_kl_div")), 7),
    ]  # fmt: skip
    tail = f"max |Δ| {float(result.get('max_abs_dlogprob') or 0):.3g}"
    equal = result.get("bit_equal_fraction")
    extra = [f"{nan} NaN"] if nan else []
    extra += [f"{result['dropped']} dropped"] if result.get("dropped") else []
    extra += [tail] + ([f"{float(equal):.1%} bit-equal"] if equal is not None else [])
    line = "  ".join(parts).rstrip()
    for word in extra:
        if cell_width(line) + 2 + cell_width(word) <= width:
            line += f"  {word}"
    return line


def sentences(
    state: SessionState,
    *,
    live: bool,
    now: float,
    request: int | None = None,
    located: LocatedState | None = None,
) -> list[str]:
    """What to know and what to do next: question, trouble, verdict or progress, the first that there is.

    `request` is the divergent request under the cursor, which `o` would locate; `located` its origin.
    """
    if state.question is not None:
        return [state.question.what, state.question.why, "Press y to agree, x to cancel."]
    fresh = _fresh_trouble(state)
    if fresh is not None:
        return trouble(fresh)
    run = state.run
    if state.server.phase == "failed":
        return _server_failed(state)
    if run is not None and run.verdict is not None:
        return verdict_sentences(run.verdict, request, located)
    if run is not None and run.cancelled:
        return ["The run was cancelled; what it measured is kept.", "Next: run again · press r"]
    if run is not None:
        return _running(run, state, now)
    if state.server.ready:
        waiting = "The server is ready; the helpers start next." if live else "Nothing was measured."
        return [waiting, "Next: run the three helpers · press r" if live and state.job is None else ""]
    if state.seq == 0:
        return ["Waiting for the runner's first word."]
    if not live:
        return ["No runner works on this session.", state.runner.ended or ""]
    if launching(state):
        return ["The server is being launched; the helpers follow by themselves."]
    return [f"{_PHASES.get(state.server.phase, state.server.phase)}.".capitalize()]


def verdict_sentences(
    verdict: Mapping[str, Any], request: int | None = None, located: LocatedState | None = None
) -> list[str]:
    """The first piece of evidence, the conditions with the grade, the next step."""
    lines = []
    evidence, grade = _texts(verdict.get("evidence")), str(verdict.get("grade") or "unknown")
    if evidence:
        lines.append(_sentence(evidence[0]))
    conditions = [condition_words(name) for name in _strings(verdict.get("conditions"))]
    outcome = str(verdict.get("status", "undecided"))
    if outcome == "none":
        lines.append(f"No divergence · {grade}")
    elif conditions:
        lines.append(f"Looks like {' or '.join(conditions)} · {grade}")
    else:
        lines.append(f"Undecided · {grade}")
    steps, codes = _texts(verdict.get("next")), _codes(verdict.get("next"))
    if located is not None:
        findings = located.result.get("findings")
        first = findings[0] if isinstance(findings, list) and findings else None
        where = (
            f"{first.get('module')} ({first.get('grade')})" if isinstance(first, Mapping) else "none found"
        )
        lines.append(f"Origin of request {located.request}: {where} · press o")
    elif steps and codes[0] == "locate" and request is not None:
        lines.append(f"Next: locate the origin in request {request}, the one under the cursor · press o")
    elif steps:
        lines.append(f"Next: {steps[0]}")
    return lines


def condition_words(name: str) -> str:
    """A condition of the verdict in words, with its number."""
    return {
        "batch_invariance": "a batch-dependent operator (condition 1)",
        "different_function": "two different computations (condition 2)",
        "race": "a race",
    }.get(name, name.replace("_", " "))


def trouble(line: TroubleLine) -> list[str]:
    """What happened, why, what to do next."""
    mark = "✗" if line.level == "error" else "!"
    return [
        f"{mark} {line.what}",
        *([line.why] if line.why else []),
        *([f"Next: {line.next}"] if line.next else []),
    ]


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


def _run_words(run: RunState, now: float) -> Iterable[str]:
    count, new = run.prompts.get("count"), run.options.get("max_new_tokens")
    if count:
        yield f"{count} prompts" + (f" × {new} new" if new else "")
    done = sum(helper.result is not None for helper in run.helpers)
    if run.ended:
        word = "cancelled after" if run.cancelled else "done in"
        yield f"{done} of {len(run.helpers)} helpers {word} {elapsed(run.elapsed_s or 0)}"
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


def _running(run: RunState, state: SessionState, now: float) -> list[str]:
    if state.job is None:
        return ["The run did not end: what it measured is kept.", "Next: run again · press r"]
    running = next((helper for helper in run.helpers if helper.status == "running"), None)
    what = f"{running.helper}: {_arm_words(running, now, short=True)}" if running else "the helpers start"
    return [
        f"Measuring · {what}",
        "Each helper's table fills as soon as its arms have ended.",
        "x cancels; what is measured is kept.",
    ]


def _server_failed(state: SessionState) -> list[str]:
    end = state.server.ended
    lines = ["✗ The server failed" + (f": {end.why}" if end and end.why else "")]
    if end is not None and end.last_lines:
        lines.append(f"its last words: {end.last_lines[-1]}")
    return [*lines, "Next: look at its log · press l"]


def _fresh_trouble(state: SessionState) -> TroubleLine | None:
    """The latest error, as long as nothing was measured or located after it."""
    if not state.troubles:
        return None
    line = state.troubles[-1]
    if line.level != "error":
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


def _codes(items: object) -> list[str]:
    if not isinstance(items, list | tuple):
        return []
    return [str(item.get("code", "")) for item in items if isinstance(item, Mapping)]


def _strings(items: object) -> list[str]:
    return [str(item) for item in items] if isinstance(items, list | tuple) else []
