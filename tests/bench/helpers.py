"""The three helpers as klbench runs them beside sglang's own kl_test_utils, on one server, in turns.

    $ uv run python -m tests.bench.helpers --write               32 prompts of 300 tokens, 128 new ones
    $ uv run python -m tests.bench.helpers --long --write        32 prompts of 3,000 tokens, 512 new ones
    | helper | prompts | sglang's own | klbench | ratio | of it the client's processor: both | ...

Each turn is a process of its own, as in use; what is timed is the helper alone, without imports. A server
gets slower from turn to turn (most after its first one), by more than what is looked for: each way has a
whole turn that does not count, then who begins a round alternates, and the means of an even number of rounds
are compared, in which a steady drift is no difference. klbench's time holds what it does for a helper's
numbers: checks, the generation arm and the columns on the disk, the statistics; the texts of the tokens,
which it asks for when the numbers are there, are no part of it. The long one takes a model of one layer and
one head: one of four layers takes too long on a CPU, and the faster the server, the more of the time is the
client's. Both send the same requests, and the server's time for them is not the same twice: what the client
itself takes of the processor says more than the last hundredths of the ratio.
Budget: within 2 % of sglang's own, and never the whole response set in memory at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klbench.core.columns import HELPERS
from klbench.zoo import make_model, plain_token_ids, seeded_prompts, zoo_root
from tests.bench.measure import benchmark, markdown, publish, where
from tests.bench.models import SLIM, model_folder
from tests.insitu.zoo_server import zoo_server

# Both get: URL, prompt file, new tokens, samples, model; both print seconds by helper, the resident bytes
# before the first one and the peak.
_REPORT = """
import json, re
def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
def report(seconds, processor, before):
    peak = memory("VmHWM")
    told = {"seconds": seconds, "processor": processor, "before": before, "peak": peak}
    print("measured:" + json.dumps(told))
"""
_THEIRS = (
    _REPORT
    + """
import sys, time
from sglang.test import kl_test_utils as stock
url, _, new_tokens, samples, model = sys.argv[1:6]
seconds, processor, before = {}, {}, memory("VmRSS")
for name, suffix in (("match", ""), ("prefill_cache_hit", "_prefill_cache_hit"),
                     ("decode_cache_hit", "_decode_cache_hit")):
    helper = getattr(stock, "test_input_output_logprobs_match" + suffix + "_helper")
    began, spent = time.perf_counter(), time.process_time()
    helper(url, {model: {"kl_div": 1e9}}, model, max_samples=int(samples), max_new_tokens=int(new_tokens))
    seconds[name], processor[name] = time.perf_counter() - began, time.process_time() - spent
report(seconds, processor, before)
"""
)
_OURS = (
    _REPORT
    + """
import asyncio, json, pathlib, sys, tempfile, time
from klbench.core.columns import HELPERS
from klbench.core.kl import helper_result
from klbench.engine.server import Server
from klbench.session.arm_file import SavedArm, save_arm
from klbench.session.columns import save_columns
url, prompts, new_tokens, samples = sys.argv[1:5]
async def main():
    seconds, processor, before = {}, {}, memory("VmRSS")
    server = await Server.attach(url)
    given = json.loads(pathlib.Path(prompts).read_text())[:int(samples)]
    with tempfile.TemporaryDirectory() as place:
        for helper in HELPERS:
            began, spent = time.perf_counter(), time.process_time()
            arm = pathlib.Path(place) / f"{helper}-arm.npz"
            keep = lambda made: save_arm(arm, SavedArm(made, "", {}))
            columns = await server.run_helper(helper, given, max_new_tokens=int(new_tokens), keep=keep)
            helper_result(columns, max_new_tokens=int(new_tokens))
            save_columns(pathlib.Path(place) / f"{helper}.npz", columns)
            seconds[helper] = time.perf_counter() - began
            processor[helper] = time.process_time() - spent
    await server.client.close()
    report(seconds, processor, before)
asyncio.run(main())
"""
)


def turn(program: str, arguments: list[str], cache: Path) -> dict[str, Any]:
    """What one process measured."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("measured:"):
            return dict(json.loads(line.removeprefix("measured:")))
    raise SystemExit(f"a turn failed: {done.stderr[-2000:]}")


def seed_cache(cache: Path, model: str, prompts: list[list[int]]) -> None:
    """sglang's own helpers take their prompts from a cache file; here they find ours."""
    folder = cache / "sglang" / "longbench"
    folder.mkdir(parents=True)
    name = model.replace("/", "_")
    for count in (48, len(prompts)):
        (folder / f"input_ids_{name}_3000_{count}.json").write_text(json.dumps(prompts))


def measure(samples: int, prompt_tokens: int, new_tokens: int, rounds: int, model: Path) -> list[str]:
    """The table's lines."""
    prompts = seeded_prompts(samples, prompt_tokens, 5, plain_token_ids())
    pool = max(65536, 2 * sum(len(prompt) + 2 * new_tokens for prompt in prompts))
    ways = {"theirs": _THEIRS, "ours": _OURS}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with (
        tempfile.TemporaryDirectory(prefix="klbench-bench-") as text,
        zoo_server("dense", ["--max-total-tokens", str(pool)], model=model) as server,
    ):
        place = Path(text)
        seed_cache(place, str(model), prompts)
        file = place / "prompts.json"
        file.write_text(json.dumps(prompts))
        arguments = [server.url, str(file), str(new_tokens), str(samples), str(model)]
        for program in ways.values():
            turn(program, arguments, place)
        for number in range(rounds):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                one = turn(ways[name], arguments, place)
                print(name, one, file=sys.stderr, flush=True)
                seen[name].append(one)
    return table(seen, f"{samples} x {prompt_tokens:,} + {new_tokens}")


def table(seen: dict[str, list[dict[str, Any]]], size: str) -> list[str]:
    """Helper by helper: means of the rounds, and the ratio of the means."""

    def mean(name: str, what: str, helpers: Sequence[str]) -> float:
        return sum(statistics.mean(one[what][helper] for one in seen[name]) for helper in helpers)

    def peak(name: str) -> str:
        middle = {key: statistics.median(one[key] for one in seen[name]) / 1e6 for key in ("peak", "before")}
        return f"{middle['peak']:.0f} MB, {middle['peak'] - middle['before']:.0f} MB of it by the helpers"

    rows = []
    for helper in (*HELPERS, "all three"):
        chosen = HELPERS if helper == "all three" else (helper,)
        theirs, ours = (mean(name, "seconds", chosen) for name in ("theirs", "ours"))
        client = " / ".join(f"{mean(name, 'processor', chosen):.2f} s" for name in ("theirs", "ours"))
        row = [helper, size, f"{theirs:.2f} s", f"{ours:.2f} s", f"{ours / theirs:.3f}", client, "", ""]
        rows.append(row)
    rows[-1][-2:] = [peak("theirs"), peak("ours")]
    head = [
        "helper", "prompts", "sglang's own", "klbench", "ratio", "of it the client's processor: both",
        "peak, sglang's own", "peak, klbench",
    ]  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--long", action="store_true", help="3,000 and 512 tokens on a model of one layer")
    given = parser.parse_args()
    prompt_tokens = given.prompt_tokens or (3000 if given.long else 300)
    new_tokens = given.new_tokens or (512 if given.long else 128)
    rounds = given.rounds or (2 if given.long else 4)
    if rounds % 2:
        parser.error("--rounds must be even: each way begins as often as the other")
    model = model_folder(SLIM) if given.long else make_model("dense", zoo_root())
    what = f"{where()}; {'one layer, one head; ' if given.long else ''}means of {rounds} rounds"
    found = measure(given.samples, prompt_tokens, new_tokens, rounds, model)
    publish("bench-helpers-long" if given.long else "bench-helpers", [what, "", *found], write=given.write)


if __name__ == "__main__":
    main()
