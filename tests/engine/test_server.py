"""Our helpers beside sglang's own on one live server, and what a live server does when it is disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from klbench.core.columns import HELPERS
from klbench.core.kl import helper_result, summarise
from klbench.engine.capture_control import RequestIds
from klbench.engine.launching import LaunchError
from klbench.engine.prompts import load_prompts
from klbench.engine.server import Server
from klbench.engine.target import Demo, LaunchOptions
from klbench.errors import UndecidedError
from klbench.zoo import plain_token_ids, seeded_prompts

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

SAMPLES, NEW_TOKENS = 8, 24
PROMPTS = seeded_prompts(SAMPLES, 60, 3, plain_token_ids())

# sglang's own helpers, unchanged, with a threshold that nothing fails.
STOCK = """\
import sys
from sglang.test import kl_test_utils as stock
url, model, samples, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
for name in ("", "_prefill_cache_hit", "_decode_cache_hit"):
    helper = getattr(stock, "test_input_output_logprobs_match" + name + "_helper")
    helper(url, {model: {"kl_div": 1e9}}, model, max_samples=samples, max_new_tokens=new_tokens)
"""


@pytest.fixture(scope="module")
def noisy(demo_server):  # type: ignore[no-untyped-def]
    """Without deterministic inference, so that the numbers to compare are not all zero."""
    return demo_server("dense", (), None, deterministic=False)


@pytest.fixture
async def server(noisy):  # type: ignore[no-untyped-def]
    fresh = noisy.server()
    yield fresh
    await fresh.client.close()


async def test_our_helpers_and_sglangs_own_read_the_same_numbers_to_the_last_bit(
    server: Server, tmp_path: Path
) -> None:
    model = server.facts.model
    assert model is not None
    cache = tmp_path / "sglang" / "longbench"
    cache.mkdir(parents=True)
    name = model.replace("/", "_")
    (cache / f"input_ids_{name}_3000_48.json").write_text(json.dumps(PROMPTS))
    # The bits of this server depend on its batches, and those at times on how busy the machine is.
    for _ in range(5):
        theirs = await stock_numbers(server, tmp_path)
        summaries = [
            summarise(await server.run_helper(helper, PROMPTS, max_new_tokens=NEW_TOKENS))
            for helper in HELPERS
        ]
        ours = [(summary.avg_kl_nats, summary.kl_nats.tolist()) for summary in summaries]
        if ours == theirs:
            break
    assert ours == theirs
    assert [summary.tokens for summary in summaries] == [SAMPLES * NEW_TOKENS] * 3
    assert max(average for average, _ in theirs) > 0, "nothing would be compared if every number were zero"


async def stock_numbers(server: Server, cache: Path) -> list[tuple[float, list[float]]]:
    """Of each of sglang's own helpers the average, and the divergence of each request."""
    assert server.plan is not None
    assert server.facts.model is not None
    sizes = (str(SAMPLES), str(NEW_TOKENS))
    stock = await asyncio.to_thread(
        subprocess.run,
        [str(server.plan.python.path), "-c", STOCK, server.url, server.facts.model, *sizes],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    averages = [float(value) for value in re.findall(r"^avg_kl_div=(\S+)$", stock.stdout, re.MULTILINE)]
    each = [
        [float(value) for value in re.findall(r"[-+0-9.e]{5,}", line)]
        for line in re.findall(r"^kl_divs=(.*)$", stock.stdout, re.MULTILINE)
    ]
    return list(zip(averages, each, strict=True))


async def test_what_is_in_force_is_read_back_from_the_server(server: Server) -> None:
    facts = server.facts
    assert (facts.device, facts.attention_backend) == ("cpu", "torch_native")
    assert facts.deterministic is False
    assert facts.radix_cache is True
    assert facts.kv_cache_dtype == "bfloat16"
    assert facts.vocab_size == 768
    assert server.differs == []
    assert {presence.role for presence in server.presences} >= {"scheduler", "launcher"}


async def test_prompts_that_share_a_prefix_hit_the_cache_inside_match_and_are_counted(server: Server) -> None:
    # More than one prefill batch holds: the later requests find what the first batch has cached.
    (common,) = seeded_prompts(1, 800, 11, plain_token_ids())
    prompts = [common + prompt[:20] for prompt in seeded_prompts(16, 60, 3, plain_token_ids())]
    assert server.facts.chunked_prefill_size is not None
    assert sum(map(len, prompts)) > server.facts.chunked_prefill_size
    columns = await server.run_helper("match", prompts, max_new_tokens=2)
    assert 0 < columns.cached_generation.max() <= len(common)
    result = helper_result(columns)
    assert result["hits"] == int(np.count_nonzero(columns.cached_generation))
    assert 0 < result["hits"] < 16
    assert not columns.cached_scoring.any()


async def test_seeded_prompts_do_not_hit_each_other(server: Server) -> None:
    found = await load_prompts(server, samples=4, prompt_tokens=40, seed=5)
    columns = await server.run_helper("match", found.prompts, max_new_tokens=2)
    assert not columns.cached_generation.any()
    assert found.as_dict()["count"] == 4


async def test_a_prompt_file_goes_through_the_servers_tokenizer(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "only the"}\n{"input_ids": [1, 2, 3]}\n')
    found = await load_prompts(server, str(file), samples=2)
    assert found.prompts[1] == (1, 2, 3)
    assert await server.client.detokenize([found.prompts[0]]) == ["only the"]


async def test_a_cancelled_helper_leaves_nothing_running_on_the_server(server: Server) -> None:
    heard = asyncio.Event()

    class Observer:
        def arm_started(self, *_: object) -> None: ...

        def arm_progress(self, _arm: str, done: int, total: int, *_: object) -> None:
            if 0 < done < total:
                heard.set()

        def arm_stalled(self, *_: object) -> None: ...

        def arm_ended(self, *_: object) -> None: ...

    work = asyncio.create_task(server.run_helper("match", PROMPTS, max_new_tokens=7000, observe=Observer()))
    await asyncio.wait_for(heard.wait(), 900)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await server.client.flush()
    load = await server.client.load()
    assert load is not None
    assert (load.running, load.queued, load.used_tokens) == (0, 0, 0)


async def test_one_request_of_others_is_seen_in_the_batches_of_ours(server: Server) -> None:
    assert server.nonce is not None
    ids = RequestIds(server.nonce)

    async def helper() -> int:
        await server.run_helper("match", PROMPTS, max_new_tokens=4, rids=ids.next_pass(), flush=False)
        return server.foreign_requests

    assert await helper() == 0
    other = asyncio.create_task(server.client.generate([[1, 2, 3]], max_new_tokens=7000, rids=["other"]))
    while (load := await server.client.load()) is None or not load.running:
        continue
    try:
        assert await helper() == 1
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_an_error_of_the_server_is_shown_in_its_own_words(server: Server) -> None:
    with pytest.raises(Exception, match="status 400") as error:
        await server.client.generate([[1] * 9000], max_new_tokens=1)
    assert "longer than the model's context length" in getattr(error.value, "why", "")


async def test_a_server_that_dies_says_how_and_leaves_nothing(server: Server) -> None:
    """Last in this module: it kills the server."""
    process = server.process
    assert process is not None
    pids = process.pids()
    schedulers = [pid for pid in pids if "scheduler" in psutil.Process(pid).name()]
    assert schedulers
    psutil.Process(schedulers[0]).kill()
    with pytest.raises(LaunchError, match="the server died") as error:
        await server.run_helper("match", PROMPTS, max_new_tokens=2000)
    assert not error.value.ended.expected
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_launch_that_fails_shows_what_the_server_itself_says(tmp_path: Path) -> None:
    options = LaunchOptions(arguments=("--no-such-option-of-sglang", "1"))
    with pytest.raises(LaunchError) as error:
        await Server.start(Demo("dense"), options, folder=tmp_path)
    assert "unrecognized arguments: --no-such-option-of-sglang" in error.value.why
    assert "exit code 2" in error.value.why


def test_without_a_radix_cache_the_hit_helpers_say_why_they_cannot_run(noisy) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    server = noisy.server()
    server.facts = replace(server.facts, radix_cache=False)
    assert server.why_not("match") is None
    assert "radix cache is off" in server.why_not("prefill_cache_hit")
    server.facts = replace(server.facts, speculative="EAGLE")
    with pytest.raises(UndecidedError, match="speculatively"):
        server.check_comparable()
