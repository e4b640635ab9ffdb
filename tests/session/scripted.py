"""A runner's work without an engine: does what a test says, for tests of everything around the engine."""

import asyncio

from klbench.errors import ServerError
from klbench.session import events as ev
from klbench.session.interruption import interrupted

RESULT = {
    "status": "clean",
    "reason": None,
    "requests": 4,
    "hits": 0,
    "dropped": 0,
    "tokens": 64,
    "avg_kl_div": 0.0,
    "threshold": 0.0,
    "max_abs_dlogprob": 0.0,
    "divergent_tokens": 0,
    "bit_equal_fraction": 1.0,
    "fraction_past": {"1e-09": 0.0},
    "nan_count": 0,
    "requests_detail": [],
}
DETAIL = {
    "index": 2,
    "prompt_len": 268,
    "cached_tokens": 267,
    "output_len": 16,
    "kl": 5.4e-5,
    "divergent_tokens": 16,
    "first_divergence": {"offset": 0, "position": 268},
}
DIVERGED = {
    **RESULT,
    "status": "diverged",
    "avg_kl_div": 1.4e-5,
    "divergent_tokens": 16,
    "requests_detail": [DETAIL],
}
FINDING = {
    "kind": "operator",
    "kinds": ["operator"],
    "module": "model.layers.1.self_attn.o_proj",
    "layer": 1,
    "request": 2,
    "helper": "match",
    "arm": "scoring",
    "rank": 0,
    "phase": "extend",
    "positions": {"first": 0, "count": 268},
    "grade": "probable",
    "evidence": [{"code": "inputs_equal", "text": "its inputs are bit-equal", "values": {}}],
    "ulp_max": 1,
    "replay_M": None,
    "latent": False,
}
SERVER = {"sglang_version": "0.5.23", "device": "cpu", "attention_backend": "torch_native", "page_size": 1}
VERDICT = {"status": "none", "conditions": [], "grade": "probable", "evidence": [], "next": []}


class ScriptedWork:
    """`results` gives each helper's object; a helper named in `hold` waits until the test lets it go."""

    def __init__(self, session, results=None, hold=(), fail=None, findings=(FINDING,)):
        self.session = session
        self.results = results or {}
        self.hold = {name: asyncio.Event() for name in hold}
        self.fail = fail
        self.findings = findings
        self.closed = 0
        self.ready = False

    async def launch(self, _job):
        if self.ready:
            return
        if "launch" in self.hold:
            await self.hold["launch"].wait()
        if self.fail == "launch":
            raise ServerError("no server", why="the scheduler died", next="read the log")
        self.session.emit(ev.ServerReady(server=SERVER, url="http://127.0.0.1:1", launch_s=2.0))
        self.ready = True

    async def run(self, job, helpers):
        await self.launch(job)
        helpers = helpers or ("match", "prefill_cache_hit", "decode_cache_hit")
        number = len(self.session.state.runs) + 1
        prompts = {"source": "seeded", "count": 4, "sha256": "ab" * 32}
        self.session.emit(ev.RunStarted(run=number, helpers=list(helpers), prompts=prompts, options={}))
        await self._helpers(number, helpers)

    async def _helpers(self, number, helpers):
        cancelled = True
        try:
            for helper in helpers:
                self.session.emit(
                    ev.ArmStarted(run=number, helper=helper, arm="generation", requests=4, tokens=9)
                )
                if helper in self.hold:
                    await self.hold[helper].wait()
                if self.fail == helper:
                    raise RuntimeError("boom \x1b[31m")
                result = self.results.get(helper, RESULT)
                self.session.emit(
                    ev.HelperEnded(run=number, helper=helper, result=result, columns=None, elapsed_s=1.0)
                )
            cancelled = False
        finally:
            self.session.emit(ev.RunEnded(run=number, verdict=VERDICT, elapsed_s=1.0, cancelled=cancelled))

    async def resume(self, job):
        found = interrupted(self.session.state)
        await self.launch(job)
        self.session.emit(ev.RunContinued(run=found.run.number, helpers=list(found.left)))
        await self._helpers(found.run.number, found.left)

    async def locate(self, _job, helper, request, _relaunch):
        result = {
            "alignment": {"proved": True, "rows": 268, "reason": None},
            "capture": {"backend": "dumper", "bytes": 10, "changed_logprobs": False},
            "findings": list(self.findings),
            "masked": [],
            "around": [{"module": "model.layers.1.self_attn.o_proj", "inputs": "equal", "output": "differs"}],
        }
        self.session.emit(
            ev.Located(
                locate=1, helper=helper or "match", request=request or 2, result=result, elapsed_s=3.0, run=1
            )
        )

    async def relaunch(self, job, _ready_to_capture):
        self.ready = False
        await self.launch(job)

    async def report(self, _job):
        self.session.emit(ev.ReportWritten(files=["reports/a.md"]))

    async def close(self):
        self.closed += 1
