"""Replay, census and confirmation on the real server with a planted fault; results that are no results."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from klbench.core.census import OperatorReplay
from klbench.core.columns import HelperColumns
from klbench.engine.arms import ArmOptions, run_arms
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import CaptureControl, RequestIds
from klbench.engine.captured_work import ServerSide, Work, first_divergent_offset
from klbench.engine.census import take_census
from klbench.engine.client import ServerClient
from klbench.engine.confirm import carrier_tokens, confirm
from klbench.engine.dump_process import DumpProcess
from klbench.engine.export import export_origin
from klbench.engine.facts import read_model_config
from klbench.engine.replay import decode_result, replay
from klbench.errors import UndecidedError
from klbench.zoo import make_model, plain_token_ids, seeded_prompts, zoo_root
from tests.core.made_columns import make_columns

O_PROJ = "model.layers.1.self_attn.o_proj"
PROMPTS = seeded_prompts(4, 110, 11, plain_token_ids())
NEW_TOKENS = 12


class Replayed:
    """What one server with the fault was asked, once for all tests of this module."""

    census: tuple[OperatorReplay, ...]
    first: Outcome
    outcome: Outcome
    columns: HelperColumns
    after: HelperColumns
    refused: UndecidedError


@pytest.fixture(scope="module")
def replayed(demo_server, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    demo = demo_server("dense", fault="o_proj-rows:layer=1,rows=64")
    folder = tmp_path_factory.mktemp("replays")
    found = Replayed()

    async def ask() -> None:
        async with ServerClient(demo.url) as client:
            side = ServerSide(
                client=client,
                control=CaptureControl(demo.control_dir, demo.nonce, [0]),
                ids=RequestIds(demo.nonce),
                dumps=DumpProcess(Path(sys.executable), dict(demo.server().plan.spec.environment)),
                model_config=read_model_config(str(make_model("dense", zoo_root()))) or {},
                options=ArmOptions(separator_ids=(44,)),
            )

            async def measure() -> HelperColumns:
                return await run_arms(
                    client, "match", PROMPTS, max_new_tokens=NEW_TOKENS, rids=side.ids.next_pass()
                )

            found.columns = await measure()
            measured_pass = side.ids.latest_pass
            found.census = await take_census(side, PROMPTS, folder=folder / "census")
            found.after = await measure()
            offsets = [first_divergent_offset(found.columns, r) for r in range(found.columns.requests)]
            chosen = next(request for request, offset in enumerate(offsets) if offset is not None)
            work = Work("match", PROMPTS, chosen, found.columns, NEW_TOKENS, [measured_pass])
            found.first = await capture(side, work, trace_dir=folder)
            found.outcome = await confirm(side, found.first, trace_dir=folder)
            nowhere = {"modules": ["model.norm"], "position": 10_000}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("klbench.engine.replay._RESULT_LIMIT_S", 1.0)
                with pytest.raises(UndecidedError) as caught:
                    await replay(side, PROMPTS[0], folder=folder / "none", rows=[1], **nowhere)
            found.refused = caught.value

    asyncio.run(ask())
    return found


@pytest.mark.server
@pytest.mark.timeout(3600)
class TestOnTheServer:
    def test_the_census_names_exactly_the_planted_operator_and_where_it_changes(
        self, replayed: Replayed
    ) -> None:
        changing = [operator for operator in replayed.census if operator.status == "not_invariant"]
        assert [(operator.module, operator.first_changed) for operator in changing] == [(O_PROJ, 64)]
        assert changing[0].damage is not None
        assert changing[0].damage.ulp_max > 0
        others = {operator.status for operator in replayed.census if operator.module != O_PROJ}
        assert others == {"invariant", "stateful"}
        stateful = {operator.class_name for operator in replayed.census if operator.status == "stateful"}
        assert stateful == {"RadixAttention"}

    def test_the_census_judges_every_kind_of_stateless_operator(self, replayed: Replayed) -> None:
        judged = {operator.module for operator in replayed.census if operator.answered}
        layer = "model.layers.0"
        assert {
            "model.embed_tokens",
            f"{layer}.input_layernorm",
            f"{layer}.self_attn.qkv_proj",
            f"{layer}.self_attn.q_norm",
            f"{layer}.self_attn.rotary_emb",
            f"{layer}.mlp.gate_up_proj",
            f"{layer}.mlp.act_fn",
            f"{layer}.mlp.down_proj",
            "model.norm",
            "lm_head",
            "logprob",
        } <= judged

    def test_a_census_leaves_the_server_as_it_was(self, replayed: Replayed) -> None:
        assert (replayed.after.token_id == replayed.columns.token_id).all()
        for name in ("decode_nats", "prefill_nats"):
            before, after = getattr(replayed.columns, name), getattr(replayed.after, name)
            assert (before.view("uint32") == after.view("uint32")).all()

    def test_the_origin_is_confirmed_with_the_m_at_which_its_operator_changes(
        self, replayed: Replayed
    ) -> None:
        assert replayed.first.findings[0].grade == "probable"
        finding = replayed.outcome.findings[0]
        assert (finding.module, finding.grade, finding.replay_m) == (O_PROJ, "confirmed", 64)
        (fact,) = (fact for fact in finding.evidence if fact.code == "replay_changes")
        assert fact.values["arms_differ"] is True
        body = replayed.outcome.body()
        assert json.loads(json.dumps(body)) == body
        assert body["findings"][0]["replay_M"] == 64

    def test_its_export_shows_the_difference_without_a_server(
        self, replayed: Replayed, tmp_path: Path
    ) -> None:
        finding = replayed.outcome.findings[0].as_dict("match")
        done = export_origin(finding, 0, replayed.outcome.trace_dir, tmp_path / "export")
        text = subprocess.run(
            [sys.executable, "-I", "show.py"], cwd=done.folder, capture_output=True, text=True, check=True
        ).stdout
        lines = {int(line.split()[0]): line for line in text.splitlines() if " rows: server" in line}
        assert all(("server    0," in line) == (m < 64) for m, line in lines.items())

    def test_a_position_that_no_forward_holds_is_no_answer(self, replayed: Replayed) -> None:
        assert "replayed nothing" in replayed.refused.what


def test_the_carrier_holds_the_position_and_a_prime_number_of_rows() -> None:
    measured = make_columns(prompt_len=[10], decode=[[0.0] * 5], prefill=[[0.0] * 5])
    work = Work("match", [list(range(10))], 0, measured, 5)
    assert len(carrier_tokens(work, 3)) == 13
    assert len(carrier_tokens(work, 14)) == 15
    assert carrier_tokens(work, 14) == [*measured.prompt_ids.tolist(), *measured.token_id.tolist()]


GOOD = {
    "nonce": "a",
    "rank": 0,
    "carrier": "c",
    "error": None,
    "rows": 7,
    "total": 1,
    "operators": [
        {
            "module": "m",
            "call": 0,
            "class": "C",
            "order": 0,
            "status": "invariant",
            "reason": "",
            "total": 7,
            "tried": [1, 2],
            "judged": [0],
            "arguments": [{"name": "0", "dtype": "float32", "variants": [[0, 0]], "digests": [["aa"]]}],
        }
    ],
}


def test_a_good_result_is_read() -> None:
    assert decode_result(json.dumps(GOOD).encode()).operators[0].module == "m"


@pytest.mark.parametrize(
    "change",
    [
        {"status": "fine"},
        {"arguments": []},
        {"tried": [1, 2, 3]},
        {"judged": [0, 1]},
        {"call": "0"},
        {"module": None},
    ],
)
def test_a_damaged_result_is_refused(change: dict[str, object]) -> None:
    content = GOOD | {"operators": [GOOD["operators"][0] | change]}
    with pytest.raises(UndecidedError, match="damaged"):
        decode_result(json.dumps(content).encode())
    with pytest.raises(UndecidedError, match="damaged"):
        decode_result(json.dumps(content).encode()[:-5])
