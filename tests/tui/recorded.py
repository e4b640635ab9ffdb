"""A session written by hand from the contract types: what a runner would have left, hostile tokens included.

The numbers are drawn from a fixed seed and mean nothing; the shape is that of a wrong restore of the prefix:
requests whose cached tokens are 3 modulo 8 differ from their first token, in the helpers that hit the cache.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from klbench.core.columns import HELPERS, HelperColumns
from klbench.session import events as ev
from klbench.session.columns import save_columns
from klbench.session.folder import SessionFolder

BEGAN_AT = 1_764_444_444.0
SAMPLES, NEW_TOKENS = 32, 128
HOSTILE = {
    260: " the", 261: "\x1b[31m", 262: "[/INST]", 263: "的", 264: "\n", 265: "\u200b", 266: " of",
    267: "ing", 268: "\x1b]0;owned\x07", 269: "\u202egnp.exe", 270: "[bold red]", 271: "\t", 272: "e\u0301",
    273: "\U0001f468\u200d\U0001f469", 274: "\udc80", 275: "عربي", 276: "", 277: "x" * 200, 278: "\r",
    279: "[/b]",
}  # fmt: skip
FACTS = {
    "sglang_version": "0.5.23", "sglang_path": "/opt/sglang", "git_commit": None, "git_dirty": None,
    "torch": "2.9.1", "cuda": None, "driver": None, "gpus": [], "model": "/cache/zoo/dense-1f2e",
    "dtype": "bfloat16", "kv_cache_dtype": "auto", "quantization": None, "device": "cpu",
    "attention_backend": "torch_native", "deterministic": True, "radix_cache": True, "page_size": 1,
    "chunked_prefill_size": 2048, "tp_size": 1, "dp_size": 1, "pp_size": 1, "nnodes": 1,
    "cuda_graphs": False, "overlap": True, "speculative": None, "numerics_env": {},
}  # fmt: skip
LOG = (
    "[2025-11-29 19:27:24] server_args=ServerArgs(model_path='/cache/zoo/dense-1f2e', tp_size=1)",
    "[2025-11-29 19:27:31] \x1b[32mLoad weight begin.\x1b[0m avail mem=12.10 GB",
    "Loading: 10%\rLoading: 100%",
    "[2025-11-29 19:27:31] Load weight end. type=Qwen3ForCausalLM \x1b]0;owned\x07",
    "[2025-11-29 19:27:33] Warning: [/INST] is in the prompt",
    "[2025-11-29 19:27:34] RuntimeError: a harmless one, caught",
    "[2025-11-29 19:27:35] The server is fired up and ready to roll!",
    *(f"[2025-11-29 19:28:{i:02}] Prefill batch, #new-seq: 1, #new-token: {200 + i}" for i in range(40)),
)


@dataclass
class Recorder:
    """Appends events with times of its own."""

    folder: Path
    at: float = BEGAN_AT
    seq: int = 0
    lines: list = field(default_factory=list)

    def add(self, event: ev.Event, after_s: float = 1.0) -> None:
        self.at += after_s
        self.seq += 1
        line = msgspec.json.encode({"seq": self.seq, "at": self.at, "event": event})
        with open(self.folder / "events.jsonl", "ab") as file:
            file.write(line + b"\n")


def columns(helper: str, *, dirty: bool, samples: int = SAMPLES, new: int = NEW_TOKENS) -> HelperColumns:
    """Columns of one helper; in a dirty one, requests with cached = 3 (mod 8) differ throughout."""
    draw = np.random.default_rng(HELPERS.index(helper) + 7)
    prompt_len = draw.integers(40, 400, samples).astype(np.int64)
    cached = np.zeros(samples, np.int64) if helper == "match" else prompt_len - 1
    token_id = draw.integers(260, 280, samples * new).astype(np.int32)
    decode = (-4 * draw.random(samples * new)).astype(np.float32)
    prefill = decode.copy()
    if dirty:
        wrong = np.repeat(cached % 8 == 3, new) & (draw.random(samples * new) < 0.95)
        noise = draw.normal(0, 3e-3, samples * new)
        prefill = np.where(wrong, decode + noise, decode).astype(np.float32)
        for request in np.flatnonzero(cached % 8 == 3):
            at = request * new
            prefill[at] = decode[at] + np.float32(2e-3)
    return HelperColumns(
        helper=helper,
        prompt_len=prompt_len,
        cached_generation=cached,
        cached_scoring=np.zeros(samples, np.int64),
        output_len=np.full(samples, new, np.int64),
        dropped=np.zeros(samples, np.bool_),
        start=np.arange(samples + 1, dtype=np.int64) * new,
        token_id=token_id,
        decode_nats=decode,
        prefill_nats=prefill,
        prompt_start=np.concatenate([[0], np.cumsum(prompt_len)]).astype(np.int64),
        prompt_ids=np.zeros(int(prompt_len.sum()), np.int32),
    )


def result(measured: HelperColumns) -> dict:
    """The helper's object of klbench.run/1, from its columns."""
    delta = np.abs(measured.decode_nats.astype(np.float64) - measured.prefill_nats)
    r = measured.prefill_nats.astype(np.float64) - measured.decode_nats
    k3 = np.exp(r) - 1 - r
    differ = int((delta > 0).sum())
    hits = int((measured.cached_generation > 0).sum())
    return {
        "status": "diverged" if differ else "clean", "reason": None, "requests": measured.requests,
        "hits": hits, "dropped": 0, "tokens": len(delta), "avg_kl_div": float(k3.mean()),
        "threshold": 0.0, "max_abs_dlogprob": float(delta.max()), "divergent_tokens": differ,
        "bit_equal_fraction": float((delta == 0).mean()), "nan_count": 0,
        "fraction_past": {"1e-3": float((delta > 1e-3).mean())}, "requests_detail": [],
    }  # fmt: skip


VERDICT = {
    "status": "found",
    "conditions": ["different_function"],
    "grade": "probable",
    "evidence": [
        {
            "code": "residue",
            "text": "Only requests with cached tokens = 3 (mod 8) differ, from their first token.",
            "values": {"quantity": "cached_generation", "modulus": 8, "residue": 3},
        },
        {"code": "hits_only", "text": "Requests without a hit are clean in every helper.", "values": {}},
    ],
    "next": [
        {"code": "locate", "text": "locate the origin in a request, about 0:25 and 3 MB", "values": {}},
        {"code": "equal_m", "text": "the equal-M experiment tells restore from arithmetic", "values": {}},
    ],
}


def neighbour(module, inputs, state, output, ulp_max=None, *, origin=False) -> dict:
    return {"module": module, "layer": 1, "inputs": inputs, "state": state, "output": output,
            "origin": origin, "ulp_max": ulp_max}  # fmt: skip


def located(request: int, helper: str) -> dict:
    """The body of klbench.locate/1 with the two tables of the origin screen."""
    rows = 268
    cells = [[0] * rows for _ in range(5)]
    for layer in range(1, 5):
        cells[layer][rows - 1] = 2
    cells[1][rows - 1] = 3
    cells[1][264] = 1
    return {
        "alignment": {"proved": True, "rows": rows, "reason": None},
        "capture": {"backend": "dumper", "bytes": 2_900_000, "changed_logprobs": 0},
        "findings": [
            {
                "kind": "state_restore", "kinds": ["state_restore", "operator"],
                "module": "model.layers.1.self_attn.attn", "layer": 1, "request": request,
                "helper": helper, "arm": "generation", "rank": 0, "phase": "extend",
                "positions": {"first": 267, "count": 1}, "grade": "probable",
                "evidence": [
                    {"code": "inputs", "text": "Its inputs are bit-equal in both arms.", "values": {}},
                    {"code": "history", "text": "So is everything written before; the output differs.",
                     "values": {}},
                ],
                "ulp_max": 41, "replay_M": None, "latent": False,
            }
        ],
        "masked": [{"module": "model.layers.1.self_attn.o_proj", "layer": 1}],
        "around": [
            neighbour("model.layers.1.self_attn.qkv_proj", "equal", "none", "equal"),
            neighbour("model.layers.1.self_attn.q_norm", "equal", "none", "equal"),
            neighbour("model.layers.1.self_attn.attn", "equal", "not_observed", "differs", 41, origin=True),
            neighbour("model.layers.1.self_attn.o_proj [/x]", "differs", "none", "differs", 38),
        ],
        "around_position": 267,
        "around_arm": "generation",
        "map": {
            "layers": ["0", "1", "2", "3", "head"],
            "positions": list(range(rows)),
            "cells": cells,
        },
    }  # fmt: skip


def start(folder: Path) -> Recorder:
    """A session folder with its first event."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("runs", "reports", "server"):
        (folder / part).mkdir(exist_ok=True)
    content = {"schema": ev.SCHEMA, "klbench_version": "0.1.0", "created_at": BEGAN_AT,
               "target": {"kind": "demo", "model": "dense"}, "options": {}}  # fmt: skip
    (folder / "session.json").write_text(json.dumps(content))
    recorder = Recorder(folder)
    options = {"samples": SAMPLES, "max_new_tokens": NEW_TOKENS}
    recorder.add(ev.RunnerStarted(
        klbench_version="0.1.0", pid=4211, host="box", target={"kind": "demo", "model": "dense"},
        options=options), 0)  # fmt: skip
    return recorder


def launch(recorder: Recorder) -> None:
    """The server comes up, in phases."""
    recorder.add(ev.ServerStarting(
        command="python -m sglang.launch_server --model-path /cache/zoo/dense-1f2e --port 31234",
        log="server/server.log", ready_to_capture=True, fault="restore-key:layer=1,back=4"))  # fmt: skip
    (recorder.folder / "server" / "server.log").write_text("\n".join(LOG) + "\n", encoding="utf-8")
    for elapsed_s, phase in ((8.0, "importing"), (15.0, "loading_weights"), (17.0, "warming_up")):
        recorder.add(ev.ServerPhase(phase=phase, elapsed_s=elapsed_s), 2.0)
    recorder.add(ev.ServerReady(server=FACTS, url="http://127.0.0.1:31234", launch_s=19.5,
                                differs=[{"asked": "page_size=16", "in_force": "page_size=1"}]))  # fmt: skip
    recorder.add(ev.Call(line="curl http://127.0.0.1:31234/server_info", outcome="200", elapsed_s=0.02))
    recorder.add(ev.Call(line="curl -d '{\"text\": \"[/INST]\x1b[31m\"}' http://127.0.0.1:31234/generate",
                         outcome="200", elapsed_s=2.31))  # fmt: skip


def run_helper(recorder: Recorder, run: int, helper: str, *, dirty: bool) -> None:
    """One helper from its first arm to its texts."""
    for arm in ("generation", "scoring"):
        recorder.add(ev.ArmStarted(run=run, helper=helper, arm=arm, requests=SAMPLES, tokens=4096))
        recorder.add(ev.ArmEnded(run=run, helper=helper, arm=arm, elapsed_s=1.4))
    measured = columns(helper, dirty=dirty)
    save_columns(recorder.folder / "runs" / f"{run}-{helper}.npz", measured)
    texts = {str(key): text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
             for key, text in HOSTILE.items()}  # fmt: skip
    (recorder.folder / "runs" / f"{run}-{helper}.texts.json").write_text(json.dumps(texts))
    recorder.add(ev.HelperEnded(run=run, helper=helper, result=result(measured),
                                columns=f"runs/{run}-{helper}.npz", elapsed_s=4.2))  # fmt: skip
    recorder.add(ev.TokenTexts(run=run, helper=helper, file=f"runs/{run}-{helper}.texts.json"))


def begin_run(recorder: Recorder, run: int = 1, missed: tuple | list = ()) -> None:
    recorder.add(ev.JobStarted(job=run, kind="run", title="run the three helpers"))
    recorder.add(ev.RunStarted(
        run=run, helpers=list(HELPERS), prompts={"source": "seeded", "count": SAMPLES, "sha256": "ab" * 32},
        options={"max_new_tokens": NEW_TOKENS}, not_exercised=list(missed)))  # fmt: skip


def end_run(recorder: Recorder, run: int = 1) -> None:
    recorder.add(ev.RunEnded(run=run, verdict=VERDICT, elapsed_s=17.4))
    recorder.add(ev.JobEnded(job=run, outcome="done", elapsed_s=17.4))


def finished(folder: Path) -> Path:
    """A session that was measured, located and ended."""
    recorder = start(folder)
    launch(recorder)
    begin_run(recorder)
    for helper in HELPERS:
        run_helper(recorder, 1, helper, dirty=helper != "match")
    end_run(recorder)
    request = first_dirty("prefill_cache_hit")
    recorder.add(ev.JobStarted(job=2, kind="locate", title=f"locate the origin in request {request}"))
    recorder.add(ev.Located(locate=1, run=1, helper="prefill_cache_hit", request=request,
                            result=located(request, "prefill_cache_hit"), elapsed_s=24.0))  # fmt: skip
    recorder.add(ev.JobEnded(job=2, outcome="done", elapsed_s=24.0))
    recorder.add(ev.ServerEnded(expected=True, exit_code=0, why="stopped", last_lines=[]))
    recorder.add(ev.RunnerEnded(reason="the user stopped it"))
    return folder


def measuring(folder: Path, missed: tuple | list = ()) -> Path:
    """A session in the middle of its second helper (its runner is not alive unless a test says so)."""
    recorder = start(folder)
    launch(recorder)
    begin_run(recorder, missed=missed)
    run_helper(recorder, 1, "match", dirty=False)
    recorder.add(ev.ArmStarted(run=1, helper="prefill_cache_hit", arm="generation", requests=32, tokens=4096))
    recorder.add(ev.ArmProgress(run=1, helper="prefill_cache_hit", arm="generation", done=1680, total=4096,
                                elapsed_s=1.2, eta_s=38.0))  # fmt: skip
    return folder


def first_dirty(helper: str) -> int:
    """The request that the workbench puts first: the largest KL."""
    measured = columns(helper, dirty=True)
    r = measured.prefill_nats.astype(np.float64) - measured.decode_nats
    k3 = (np.exp(r) - 1 - r).reshape(measured.requests, -1).mean(axis=1)
    return int(np.argmax(k3))


def folder_of(path: Path) -> SessionFolder:
    return SessionFolder(path)
