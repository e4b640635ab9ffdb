"""One live server: faults that hide from hooks are found in the state; operators at equal row counts, and the
same rows in forwards of other row counts."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from klbench.core.columns import HelperColumns, HelperName
from klbench.core.finding_condition import condition_of_finding
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import RequestIds
from klbench.engine.captured_work import ServerSide, Work, as_whole_as_affordable, first_divergent_offset
from klbench.engine.confirm import confirm
from klbench.engine.fault_control import FaultControl
from klbench.engine.server import Server
from klbench.engine.state_probing import GONE, probe_state
from klbench.engine.target import Demo, LaunchOptions
from klbench.session.locating import server_side
from klbench.zoo import plain_token_ids, seeded_prompts

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

NEW_TOKENS = 16
PROMPTS = seeded_prompts(3, 80, 5, plain_token_ids())
SHARED = [PROMPTS[0][:60] + prompt[60:] for prompt in PROMPTS]


class Bench:
    """The server, one armed fault at a time, and what is measured under it."""

    def __init__(self, server: Server, traces: Path) -> None:
        assert server.control_dir is not None
        assert server.nonce is not None
        self.server = server
        self.ids = RequestIds(server.nonce)
        self.side: ServerSide = server_side(server, self.ids)
        self.faults = FaultControl(server.control_dir, server.nonce, self.side.control.ranks)
        self.traces = traces

    async def measured(
        self, fault: str, helper: HelperName, prompts: list[list[int]] = PROMPTS, first: int = 0
    ) -> tuple[HelperColumns, Work]:
        """The helper's columns with the fault armed, and the work of locating its first divergent request."""
        await self.server.client.flush()
        await self.faults.arm(fault)
        columns = await self.server.run_helper(
            helper, prompts, max_new_tokens=NEW_TOKENS, rids=self.ids.next_pass()
        )
        offsets = [first_divergent_offset(columns, request) for request in range(columns.requests)]
        divergent = (number for number, offset in enumerate(offsets) if offset is not None)
        request = next(number for number in divergent if number >= first)
        return columns, Work(helper, prompts, request, columns, NEW_TOKENS, [self.ids.latest_pass])

    async def captured(self, work: Work) -> Outcome:
        return await capture(
            self.side, as_whole_as_affordable(self.side, work), trace_dir=self.traces, numbers=False
        )


async def test_what_hides_from_hooks_is_found_in_the_state_and_what_does_not_in_its_operator(
    tmp_path: Path,
) -> None:
    server = await Server.start(
        Demo("dense"), LaunchOptions(ready_to_capture=True, fault_lab=True), folder=tmp_path / "server"
    )
    try:
        bench = Bench(server, tmp_path / "traces")
        await a_hidden_write_is_told_by_layer_and_position(bench)
        await a_hidden_restore_is_proved_within_one_arm(bench)
        await hidden_arithmetic_lies_between_two_layers(bench)
        await a_prefix_that_another_request_wrote_is_a_wrong_restore_too(bench)
        await decode_that_computes_another_function_differs_at_equal_rows(bench)
        await a_split_that_depends_on_the_rows_is_gone_at_equal_rows(bench)
        await what_depends_on_the_decode_step_is_another_function(bench)
        await a_gap_that_depends_on_the_rows_is_shown_by_row_counts_alone(bench)
    finally:
        await server.stop()


async def a_hidden_write_is_told_by_layer_and_position(bench: Bench) -> None:
    columns, work = await bench.measured("key-write:layer=1,step=4,unhooked=1", "match")
    watched = await bench.captured(work)
    assert not watched.symptom_shows
    assert [finding for finding in watched.findings if not finding.latent] == []

    found = await probe_state(bench.side, work, because=GONE, trace_dir=bench.traces)

    first = found.findings[0]
    assert (first.kind, first.module, first.layer) == ("state_write", "model.layers.1", 1)
    assert first.first_position == columns.prompt_len[work.request] + 3
    assert (first.grade, first.latent) == ("probable", False)
    assert found.notes == (GONE,)
    assert found.changed_logprobs == 0


async def a_hidden_restore_is_proved_within_one_arm(bench: Bench) -> None:
    columns, work = await bench.measured("restore-key:layer=2,unhooked=1", "prefill_cache_hit")
    cached = int(columns.cached_generation[work.request])

    found = await probe_state(bench.side, work, because=GONE, trace_dir=bench.traces)

    first = found.findings[0]
    assert (first.kinds, first.module, first.grade) == (("state_restore",), "model.layers.2", "confirmed")
    assert (first.first_position, first.phase) == (cached, "restored")
    (fact,) = (fact for fact in first.evidence if fact.code == "state_restore")
    assert (fact.values["arguments"], fact.values["state_position"]) == (["k"], cached - 4)


async def hidden_arithmetic_lies_between_two_layers(bench: Bench) -> None:
    columns, work = await bench.measured("o_proj-rows:layer=1,rows=20,unhooked=1", "match")

    found = await probe_state(bench.side, work, because=GONE, trace_dir=bench.traces)

    first = found.findings[0]
    assert first.module == "model.layers.1 -> model.layers.2"
    assert first.kinds == ("operator", "gap", "state_write")
    assert first.first_position == columns.prompt_len[work.request]


async def a_prefix_that_another_request_wrote_is_a_wrong_restore_too(bench: Bench) -> None:
    columns, work = await bench.measured("restore-key:layer=1,back=60", "prefill_cache_hit", SHARED, first=1)
    cached = int(columns.cached_generation[work.request])
    assert 0 < cached - 60 < 60

    first = (await bench.captured(work)).findings[0]

    assert (first.kinds, first.module) == (("state_restore",), "model.layers.1.self_attn.attn")
    assert (first.first_position, first.request) == (cached, 1)
    (fact,) = (fact for fact in first.evidence if fact.code == "state_restore")
    # Each request spoils a row of the prefix that all of them share.
    assert fact.values["state_position"] == int(columns.cached_generation.min()) - 60
    assert fact.values["writer_request"] == 0
    assert fact.values["written_in"] == "warming"


async def equal_m(bench: Bench, fault: str) -> tuple[Outcome, dict[str, object]]:
    _, work = await bench.measured(fault, "match")
    outcome = await confirm(bench.side, await bench.captured(work), trace_dir=bench.traces)
    first = outcome.findings[0]
    assert first.module.endswith("self_attn.attn")
    assert "metadata_right" in {fact.code for fact in first.evidence}
    (fact,) = (fact for fact in first.evidence if fact.code == "equal_m")
    return outcome, fact.values


async def decode_that_computes_another_function_differs_at_equal_rows(bench: Bench) -> None:
    _, values = await equal_m(bench, "decode-window:after=4")

    assert (values["outcome"], values["decode_M"], values["extend_M"]) == ("differs", 1, 1)


async def a_split_that_depends_on_the_rows_is_gone_at_equal_rows(bench: Bench) -> None:
    _, values = await equal_m(bench, "attention-split")

    assert values["outcome"] == "same_bits"


async def what_depends_on_the_decode_step_is_another_function(bench: Bench) -> None:
    columns, work = await bench.measured("late-norm:layer=1,after=4", "match")
    outcome = await confirm(bench.side, await bench.captured(work), trace_dir=bench.traces)

    first = outcome.findings[0]
    assert (first.module, first.grade) == ("model.layers.1.input_layernorm", "confirmed")
    facts = {fact.code: fact.values for fact in first.evidence}
    assert "replay_invariant" in facts
    made = facts["equal_m"]
    assert (made["outcome"], made["decode_M"], made["extend_M"]) == ("differs", 1, 1)
    assert made["row"] == first.first_position == columns.prompt_len[work.request] + 4
    condition, _, certain = condition_of_finding(first.as_dict("match"))
    assert (condition, certain) == ("different_function", True)


async def a_gap_that_depends_on_the_rows_is_shown_by_row_counts_alone(bench: Bench) -> None:
    _, work = await bench.measured("residual-gap:layer=1,rows=20", "match")
    outcome = await confirm(bench.side, await bench.captured(work), trace_dir=bench.traces)

    first = outcome.findings[0]
    assert (first.kind, first.grade) == ("gap", "confirmed")
    (made,) = (fact.values for fact in first.evidence if fact.code == "row_counts")
    assert made["outcome"] == "changes"
    assert made["arms_differ"] is True
    assert made["tried_M"][:4] == [3, 4, 8, 16]
    assert made["changed_M"][0] == 32
    condition, _, certain = condition_of_finding(first.as_dict("match"))
    assert (condition, certain) == ("batch_invariance", True)
