"""A server that should be clean: the helpers read exactly 0, a capture changes nothing and accuses nobody.

    $ python -m tests.gpu.clean /models/dense --stock --dumper --json clean.json --flags ...
    match              0 of 4096 differ   avg KL 0          1.9 s   sglang's own 1.9 s
    capture digest     0 of 8192 logprobs changed, 0 findings, 3.1 s, 14.2 MB in 2 files

Starts the server eager with the plugin. `--stock` runs sglang's own helpers on the same server and prompts,
in turns with ours; `--dumper` captures the same request with the stock dumper too. The JSON is written after
every step and says whether it is `finished`. Exit code 0 where all is clean, 1 where not, also where a helper
was not compared.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.kl import helper_result
from klbench.engine.capture import capture
from klbench.engine.capture_control import Backend, RequestIds
from klbench.engine.captured_work import Work
from klbench.engine.prompts import load_prompts
from klbench.engine.server import Server
from klbench.engine.target import Launch, LaunchOptions
from klbench.errors import KlbenchError
from klbench.session.folder import write_atomically
from klbench.session.locating import server_side

_TIMED = 8
"""Rounds of ours and sglang's own; an even number, for each begins as often as the other."""
_STOCK = {
    "match": "test_input_output_logprobs_match_helper",
    "prefill_cache_hit": "test_input_output_logprobs_match_prefill_cache_hit_helper",
    "decode_cache_hit": "test_input_output_logprobs_match_decode_cache_hit_helper",
}
_STOCK_PROGRAM = """
import contextlib, io, json, sys, time
from sglang.test import kl_test_utils as stock
asked = json.loads(sys.stdin.readline())
model = asked["model"]
key = f"{model}_{stock.DEFAULT_PROMPT_TOKENS}_{stock.DEFAULT_NUM_SAMPLES}"
stock._cached_input_ids[key] = asked["prompts"]
for _ in sys.stdin:
    made = []
    for name in asked["functions"]:
        said = io.StringIO()
        began = time.monotonic()
        with contextlib.redirect_stdout(said):
            getattr(stock, name)(asked["url"], {model: {"kl_div": float("inf")}}, model,
                                 max_samples=len(asked["prompts"]), max_new_tokens=asked["new_tokens"])
        elapsed_s = time.monotonic() - began
        kl = [row for row in said.getvalue().splitlines() if row.startswith("avg_kl_div=")][-1]
        made.append({"elapsed_s": elapsed_s, "avg_kl_div": float(kl.partition("=")[2])})
    print(json.dumps(made), flush=True)
"""


class StockHelpers:
    """sglang's own helpers in a process of the server's Python, which imports them once."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, server: Server, prompts: Sequence[Sequence[int]], new_tokens: int) -> "StockHelpers":
        assert server.plan is not None
        process = await asyncio.create_subprocess_exec(
            *(str(server.plan.python.path), "-c", _STOCK_PROGRAM),
            env=dict(server.plan.spec.environment) | {"SGLANG_PLUGINS": "none"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        made = cls(process)
        asked = {
            "model": server.facts.model,
            "prompts": [list(prompt) for prompt in prompts],
            "functions": list(_STOCK.values()),
            "url": server.url,
            "new_tokens": new_tokens,
        }
        made._say(asked)
        return made

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def once(self) -> list[dict[str, Any]]:
        """Each helper once, in the order of `_STOCK`: seconds and its average KL."""
        assert self._process.stdout is not None
        self._say("again")
        while line := await self._process.stdout.readline():
            if line.startswith(b"[{"):
                return list(json.loads(line))
        raise RuntimeError("sglang's own helpers ended; what they said stands above")

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Check:
    """One server, its prompts, and the document that grows."""

    def __init__(
        self, server: Server, prompts: list[list[int]], arguments: argparse.Namespace, traces: Path
    ) -> None:
        assert server.nonce is not None
        self._server = server
        self._new_tokens = arguments.new_tokens
        self._traces = traces
        self._ids = RequestIds(server.nonce)
        self._side = server_side(server, self._ids)
        self._measured: dict[HelperName, tuple[HelperColumns, int]] = {}
        self._prompts = prompts
        self._place: Path | None = arguments.json
        self.document: dict[str, Any] = {
            "server": server.facts.as_dict(),
            "launch_s": server.launch_s,
            "command": server.command,
            "notes": list(server.notes),
            "helpers": {},
            "captures": [],
            "stock": [],
            "errors": [],
            "finished": False,
            "clean": False,
        }

    def write(self, *, finished: bool = False) -> None:
        """What is known by now, whole or not at all."""
        self.document |= {"finished": finished, "clean": self.clean}
        if self._place is not None:
            content = json.dumps(self.document, default=str, indent=1).encode()
            write_atomically(self._place, content)

    async def helpers(self) -> None:
        for helper in HELPERS:
            if (reason := self._server.why_not(helper)) is not None:
                self.document["helpers"][helper] = {"status": "not_run", "reason": reason}
                continue
            rids = self._ids.next_pass()
            number = self._ids.latest_pass
            began = time.monotonic()
            columns = await self._server.run_helper(
                helper, self._prompts, max_new_tokens=self._new_tokens, rids=rids
            )
            elapsed_s = time.monotonic() - began
            self._measured[helper] = columns, number
            result = helper_result(columns)
            result.pop("requests_detail", None)
            kept = self.document["helpers"].setdefault(helper, result | {"all_s": []})
            kept["all_s"].append(elapsed_s)
            if result["status"] != "clean":
                kept.update(result)
            print(
                f"{helper:18s} {result['status']:9s} "
                f"{result['divergent_tokens']} of {result['tokens']} differ  "
                f"avg KL {result['avg_kl_div']:.3g}  hits {result['hits']}  {elapsed_s:.2f} s",
                flush=True,
            )

    async def capture(self, helper: HelperName, backend: Backend) -> None:
        """One request of the helper, the longest, over its whole generation."""
        columns, number = self._measured[helper]
        compared = [index for index in range(columns.requests) if not columns.dropped[index]]
        request = max(compared, key=lambda index: len(self._prompts[index]))
        work = Work(
            helper, self._prompts, request, columns, self._new_tokens, (number,), whole_generation=True
        )
        began = time.monotonic()
        try:
            outcome = await capture(self._side, work, trace_dir=self._traces, backend=backend, numbers=False)
        except KlbenchError as error:
            self.document["errors"].append({"capture": [helper, backend], **error.as_dict()})
            print(f"capture {helper} {backend}: {error.what}: {error.why}", flush=True)
            return
        body = outcome.body()
        made = {
            "helper": helper,
            "backend": backend,
            "request": request,
            "elapsed_s": time.monotonic() - began,
            "findings": body["findings"],
            "not_observed": [],
            **body["capture"],
            "alignment": body["alignment"],
        }
        made.pop("trace_dir", None)
        self.document["captures"].append(made)
        print(
            f"capture {helper} {backend}: {outcome.changed_logprobs} of {outcome.compared_logprobs} logprobs "
            f"changed, {len(outcome.findings)} findings, aligned {outcome.alignment.proved} "
            f"{outcome.alignment.reason or ''}, arms {outcome.capture_s:.2f} s, "
            f"{outcome.dump_bytes / 1e6:.1f} MB in {outcome.files} files",
            flush=True,
        )
        for finding in outcome.findings:
            print("   ", json.dumps(finding.as_dict(helper))[:600], flush=True)

    async def stock(self) -> None:
        """Both in turns; the first turn of each, which warms up, does not count."""
        theirs = await StockHelpers.start(self._server, self._prompts, self._new_tokens)
        try:
            await theirs.once()
            await self.helpers()
            for helper in _STOCK:
                self.document["helpers"][helper]["all_s"] = []
            for number in range(_TIMED):
                if number % 2:
                    await self.helpers()
                self.document["stock"].append(dict(zip(_STOCK, await theirs.once(), strict=True)))
                if not number % 2:
                    await self.helpers()
        finally:
            await theirs.end()
        for helper in _STOCK:
            stock_s = statistics.median(made[helper]["elapsed_s"] for made in self.document["stock"])
            ours_s = statistics.median(self.document["helpers"][helper]["all_s"])
            print(f"{helper:18s} sglang's own {stock_s:.2f} s, ours {ours_s:.2f} s", flush=True)

    @property
    def clean(self) -> bool:
        """All three helpers compared and nothing differs, nothing was changed, nobody accused."""
        results = self.document["helpers"]
        captures = self.document["captures"]
        return (
            all(results.get(helper, {}).get("status") == "clean" for helper in HELPERS)
            and not any(result.get("divergent_tokens") for result in results.values())
            and bool(captures)
            and not self.document["errors"]
            and not any(made["findings"] or made["changed_logprobs"] for made in captures)
            and all(made["alignment"]["proved"] for made in captures)
        )


async def steps(made: Check, arguments: argparse.Namespace) -> None:
    """Everything that is asked for, written after each step."""
    await made.helpers()
    made.write()
    for helper in arguments.capture or HELPERS:
        if made.document["helpers"][helper]["status"] != "not_run":
            await made.capture(helper, "digest")
            made.write()
    if arguments.dumper:
        await made.capture("match", "dumper")
        made.write()
    if arguments.stock:
        await made.stock()
    made.write(finished=True)


async def check(arguments: argparse.Namespace, folder: Path) -> Check:
    """Everything about one server."""
    options = LaunchOptions(
        arguments=tuple(arguments.flags), ready_to_capture=True, server_python=arguments.server_python
    )
    server = await Server.start(Launch(str(arguments.model)), options, folder=folder / "server")
    print(f"started in {server.launch_s:.0f} s: {server.command}", flush=True)
    try:
        prompts = await load_prompts(
            server, samples=arguments.samples, prompt_tokens=arguments.prompt_tokens, seed=arguments.seed
        )
        made = Check(server, prompts.as_lists(), arguments, folder / "traces")
        await steps(made, arguments)
        return made
    finally:
        await server.stop()


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description="Checks a server that should be clean.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="sglang's own helpers beside ours")
    parser.add_argument("--dumper", action="store_true", help="capture with the stock dumper too")
    parser.add_argument("--capture", action="append", choices=HELPERS, help="only these (default: all)")
    parser.add_argument("--server-python", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="sglang's own; must come last")
    return parser.parse_args(words)


def main() -> int:
    arguments = arguments_of()
    if arguments.json is not None:
        arguments.json.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="klbench-gpu-") as name:
        try:
            made = asyncio.run(check(arguments, Path(name)))
        except KlbenchError as error:
            print(f"{error.what}: {error.why}", flush=True)
            if arguments.json is not None:
                made_so_far = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
                arguments.json.write_text(json.dumps(made_so_far | {"error": error.as_dict()}, indent=1))
            return 2
    print("clean" if made.clean else "NOT CLEAN", flush=True)
    return 0 if made.clean else 1


if __name__ == "__main__":
    sys.exit(main())
