"""How a server differs from a stock deterministic one: what to know before repeating a finding."""

from __future__ import annotations

from klbench.session.state import SessionState


def not_stock(state: SessionState) -> list[str]:
    """One sentence for each difference; a fact that nobody told is no difference."""
    server, facts = state.server, state.server.facts
    notes = []
    if not facts:
        return ["No server became ready: what it would have run with is unknown."]
    for name, expected, sentence in (
        ("deterministic", True, "deterministic inference is off"),
        ("radix_cache", True, "the radix cache is off"),
        ("overlap", True, "the overlap scheduler is off"),
        ("git_dirty", False, "sglang's checkout has edited files"),
        ("speculative", None, "it decodes speculatively"),
        ("quantization", None, f"its weights are quantised: {facts.get('quantization')}"),
    ):
        if name in facts and facts[name] is not None and facts[name] != expected:
            notes.append(sentence)
    if facts.get("cuda_graphs") is False and facts.get("device") not in (None, "cpu"):
        notes.append("it runs eager: no CUDA graph is replayed")
    if facts.get("device") == "cpu":
        notes.append("it runs on the CPU with klbench's reference operators")
    if server.ready_to_capture:
        notes.append("it was started ready to capture, with klbench's plugin")
    kv, dtype = facts.get("kv_cache_dtype"), facts.get("dtype")
    if kv not in (None, "auto", dtype):
        notes.append(f"its K/V cache is {kv} while the model is {dtype}")
    for name, value in dict(facts.get("numerics_env") or {}).items():
        notes.append(f"environment: {name}={value}")
    arguments = state.runner.target.get("arguments") or []
    if arguments:
        notes.append(f"arguments of the user: {' '.join(map(str, arguments))}")
    if server.fault:
        notes.append(f"a fault was planted: {server.fault}")
    return notes
