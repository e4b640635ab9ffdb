"""Captures on the real server: a planted fault is located in its operator, and a clean run blames nobody."""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.finding_condition import does_not_repeat
from klbench.engine.arms import ArmOptions, NotRepeatedError, run_arms
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import CaptureControl, RequestIds
from klbench.engine.captured_work import (
    ServerSide,
    Work,
    first_divergent_offset,
    forecast_for,
    generation_tokens,
)
from klbench.engine.client import ServerClient
from klbench.engine.dump_process import DumpProcess
from klbench.engine.facts import read_model_config
from klbench.errors import UndecidedError
from klbench.zoo import make_model, plain_token_ids, seeded_prompts, zoo_root

COMMA = (44,)
NEW_TOKENS = 24
PROMPTS = seeded_prompts(6, 90, 11, plain_token_ids())

_ids: dict[str, RequestIds] = {}


def server_side(demo, kind: str, client: ServerClient) -> ServerSide:
    environment = dict(demo.server().plan.spec.environment)
    return ServerSide(
        client=client,
        control=CaptureControl(demo.control_dir, demo.nonce, [0]),
        # One count of passes for as long as the server lives.
        ids=_ids.setdefault(demo.nonce, RequestIds(demo.nonce)),
        dumps=DumpProcess(Path(sys.executable), environment),
        model_config=read_model_config(str(make_model(kind, zoo_root()))) or {},
        options=ArmOptions(separator_ids=COMMA),
    )


def measure_and_capture(
    demo, kind: str, helper: HelperName, trace_dir: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **more
) -> tuple[HelperColumns, Outcome]:
    """Measures the helper, then captures its earliest divergent request (the first one where none is)."""

    async def both() -> tuple[HelperColumns, Outcome]:
        async with ServerClient(demo.url) as client:
            side = server_side(demo, kind, client)
            columns = await run_arms(
                client,
                helper,
                prompts,
                max_new_tokens=NEW_TOKENS,
                rids=side.ids.next_pass(),
                options=side.options,
            )
            offsets = {r: first_divergent_offset(columns, r) for r in range(columns.requests)}
            dirty = [request for request, offset in offsets.items() if offset is not None]
            chosen = min(dirty, key=lambda request: offsets[request] or 0) if dirty else 0
            work = Work(helper, prompts, chosen, columns, NEW_TOKENS, [side.ids.latest_pass])
            return columns, await capture(side, work, trace_dir=trace_dir, **more)

    return asyncio.run(both())


def assert_a_true_repetition(outcome: Outcome) -> None:
    """The capture was the measured experiment and changed nothing."""
    assert outcome.alignment.proved, outcome.alignment.reason
    assert outcome.changed_logprobs == 0
    assert outcome.compared_logprobs > 0
    assert outcome.repetition is not None
    assert outcome.repetition.repeated, outcome.repetition.first_difference


@pytest.mark.server
@pytest.mark.timeout(3600)
class TestRestoreKey:
    """Layer 1 finds one wrong key where a request begins on a restored prefix."""

    @pytest.fixture
    def demo(self, demo_server):
        return demo_server("dense", fault="restore-key:layer=1,back=4")

    def test_a_cold_helper_is_clean_and_its_capture_blames_nobody(self, demo, tmp_path: Path) -> None:
        columns, outcome = measure_and_capture(demo, "dense", "match", tmp_path)

        assert (columns.decode_nats == columns.prefill_nats).all()
        assert_a_true_repetition(outcome)
        assert outcome.findings == ()
        assert not outcome.symptom_shows

    def test_other_tokens_are_refused_or_captured_as_a_run_of_its_own(self, demo, tmp_path: Path) -> None:
        async def twice() -> Outcome:
            async with ServerClient(demo.url) as client:
                side = server_side(demo, "dense", client)
                columns = await run_arms(
                    client,
                    "prefill_cache_hit",
                    PROMPTS,
                    max_new_tokens=NEW_TOKENS,
                    rids=side.ids.next_pass(),
                    options=side.options,
                )
                # As if the measured run had generated another last token.
                token_id = columns.token_id.copy()
                token_id[-1] += 1
                before = dataclasses.replace(columns, token_id=token_id)
                offsets = [first_divergent_offset(columns, r) for r in range(columns.requests)]
                chosen = next(r for r, offset in enumerate(offsets) if offset is not None)
                passes = [side.ids.latest_pass]
                work = Work("prefill_cache_hit", PROMPTS, chosen, before, NEW_TOKENS, passes, True)
                with pytest.raises(NotRepeatedError):
                    await capture(side, work, trace_dir=tmp_path, keep_dumps=True)
                assert os.listdir(tmp_path) == []
                return await capture(side, dataclasses.replace(work, must_repeat=False), trace_dir=tmp_path)

        outcome = asyncio.run(twice())
        assert (outcome.repeats, outcome.changed_logprobs, outcome.symptom_shows) == (False, 0, True)
        assert outcome.compared_logprobs == 2 * (len(PROMPTS) * NEW_TOKENS - 1)
        first = outcome.findings[0].as_dict("prefill_cache_hit")
        assert (first["module"], first["kind"]) == ("model.layers.1.self_attn.attn", "state_restore")
        assert first["grade"] == "unknown"
        assert "generated other tokens" in (does_not_repeat(first) or "")
        assert outcome.body()["capture"]["generated_tokens"] == NEW_TOKENS

    @pytest.mark.parametrize("backend", ["digest", "dumper"])
    def test_the_restored_prefix_is_located_in_its_layers_attention(
        self, demo, tmp_path: Path, backend: str
    ) -> None:
        columns, outcome = measure_and_capture(demo, "dense", "prefill_cache_hit", tmp_path, backend=backend)

        assert_a_true_repetition(outcome)
        assert outcome.symptom_shows
        first = outcome.findings[0]
        assert (first.module, first.layer) == ("model.layers.1.self_attn.attn", 1)
        assert first.kind == "state_restore"
        # Only digests see the state as it was read.
        assert (first.kinds == ("state_restore",)) == (backend == "digest")
        assert (first.phase, first.arm, first.latent) == ("restored", "generation", False)
        assert first.first_position == columns.prompt_len[outcome.work.request] - 1
        assert first.ulp_max is not None
        assert first.ulp_max > 0
        assert {finding.module for finding in outcome.findings} == {first.module}

        body = outcome.body()
        assert json.loads(json.dumps(body)) == body
        assert body["capture"]["bytes"] > 100 * body["capture"]["forwards"]
        origin = [row for row in body["around"] if row["origin"]]
        assert [(row["module"], row["inputs"], row["output"]) for row in origin] == [
            (first.module, "equal", "differs")
        ]

    def test_nothing_of_the_dump_is_left_and_no_port_was_opened(self, demo, tmp_path: Path) -> None:
        _, outcome = measure_and_capture(demo, "dense", "prefill_cache_hit", tmp_path, backend="dumper")

        assert [path.name for path in tmp_path.iterdir()] == ["trace-1"]
        assert outcome.kept_dumps is None
        assert "DUMPER_SERVER_PORT" not in demo.server().plan.spec.environment
        written = outcome.dump_bytes
        assert written / 2 < outcome.forecast.size_bytes < written * 2

    def test_a_disk_that_is_too_full_is_refused_before_anything_runs(self, demo, tmp_path: Path) -> None:
        with pytest.raises(UndecidedError, match="would write about"):
            measure_and_capture(demo, "dense", "match", tmp_path, free_floor_bytes=1 << 60)

        assert not list(tmp_path.glob("dumps-*"))

    def test_a_floor_that_is_passed_during_a_capture_cuts_it_and_not_the_server(
        self, demo, tmp_path: Path
    ) -> None:
        async def cut() -> None:
            async with ServerClient(demo.url) as client:
                side = server_side(demo, "dense", client)
                folder = tmp_path / "dumps"
                folder.mkdir(mode=0o700)
                await side.control.open(folder, free_floor_bytes=1 << 60, size_cap_bytes=1 << 60)
                await run_arms(client, "match", PROMPTS[:2], max_new_tokens=2, rids=side.ids.next_pass({0}))
                await side.control.close()
                assert "floor" in str(side.control.invalid(folder))
                assert not list(folder.glob("rank0-*"))
                await run_arms(client, "match", PROMPTS[:2], max_new_tokens=2, rids=side.ids.next_pass())

        asyncio.run(cut())

    def test_a_folder_that_others_may_write_is_refused_by_the_server(self, demo, tmp_path: Path) -> None:
        async def ask() -> None:
            folder = tmp_path / "open"
            folder.mkdir()
            folder.chmod(0o777)
            async with ServerClient(demo.url) as client:
                control = server_side(demo, "dense", client).control
                await control.open(folder, free_floor_bytes=0, size_cap_bytes=1 << 30)

        with pytest.raises(UndecidedError, match="cannot capture") as caught:
            asyncio.run(ask())
        assert "0700" in caught.value.why


@pytest.mark.server
@pytest.mark.timeout(3600)
class TestDecodeWindow:
    """On the sliding-window model one key is missed after some decode steps, in one layer."""

    @pytest.fixture
    def demo(self, demo_server):
        return demo_server("swa", fault="decode-window:layer=2,after=8,back=3")

    def test_the_first_wrong_decode_row_is_located(self, demo, tmp_path: Path) -> None:
        columns, outcome = measure_and_capture(demo, "swa", "match", tmp_path)

        assert_a_true_repetition(outcome)
        first = outcome.findings[0]
        assert first.module == "model.layers.2.self_attn.attn"
        assert (first.kind, first.phase) == ("operator", "decode")
        # The row of decode step n consumes the token at prompt + n - 1, and the fault begins after 8 steps.
        assert first.first_position == columns.prompt_len[outcome.work.request] + 8
        assert {finding.module for finding in outcome.findings} == {first.module}
        assert "model.layers.3.self_attn.o_proj" not in {finding.module for finding in outcome.findings}

    def test_the_generation_arm_is_cut_behind_the_first_divergence(self, demo) -> None:
        async def look() -> None:
            async with ServerClient(demo.url) as client:
                side = server_side(demo, "swa", client)
                columns = await run_arms(
                    client, "match", PROMPTS, max_new_tokens=NEW_TOKENS, rids=side.ids.next_pass()
                )
                work = Work("match", PROMPTS, 1, columns, NEW_TOKENS, [side.ids.latest_pass])
                assert generation_tokens(work) == (first_divergent_offset(columns, 1) or 0) + 1
                assert forecast_for(side, work).forwards == generation_tokens(work) - 1 + 2

        asyncio.run(look())
