"""A whole run on a server that loses the first logprob of each request it retracts, in every arm and pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from klbench.cli import main
from klbench.cli.headless import Plan, execute
from klbench.core.columns import HELPERS
from klbench.engine.answers import Generated, Logprobs
from klbench.session.columns import load_columns
from klbench.session.folder import SessionFolder
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START

pytestmark = pytest.mark.usefixtures("places")


class Losing(FakeBench):
    """Request 1 is retracted whenever it generates."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        generate = self.fake.client.generate

        async def lossy(*arguments: Any, **how: Any) -> list[Generated]:
            answers: list[Generated] = await generate(*arguments, **how)
            return [lost(answer) if answer.rid.endswith("-1") else answer for answer in answers]

        self.fake.client.generate = lossy


def lost(answer: Generated) -> Generated:
    logprobs = answer.output_logprobs
    if not answer.output_ids or logprobs is None:
        return answer
    return replace(
        answer, retractions=1, output_logprobs=Logprobs(logprobs.nats[1:], logprobs.token_id[1:], 0)
    )


def run(path: Path, bench: Any) -> tuple[SessionFolder, dict[str, Any]]:
    document = path.with_suffix(".json")
    execute(START, Plan("run"), session=path, json_place=str(document), make_work=bench)
    return SessionFolder(path), json.loads(document.read_text())


def test_every_helper_has_its_numbers_and_says_which_token_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, document = run(tmp_path / "losing", Losing)
    whole, expected = run(tmp_path / "whole", FakeBench)
    for helper in HELPERS:
        found, before = document["helpers"][helper], expected["helpers"][helper]
        assert found["status"] == before["status"]
        assert (found["lost"], found["tokens"]) == ([1], before["tokens"] - 1)
        assert found["reason"].count("the first token of request 1 was not compared") == 1
        assert found["nan_count"] == 0
        for request in (0, 2):
            assert found["requests_detail"][request] == before["requests_detail"][request]
        measured = [load_columns(at.runs / f"1-{helper}.npz") for at in (folder, whole)]
        kept = measured[0].compared
        assert measured[0].decode_nats[kept].tobytes() == measured[1].decode_nats[kept].tobytes()
        assert measured[0].prefill_nats.tobytes() == measured[1].prefill_nats.tobytes()
    assert document["verdict"]["conditions"] == expected["verdict"]["conditions"]
    capsys.readouterr()
    assert main(["compare", str(whole.path), str(folder.path), "--json", "-"]) == 0
    change = json.loads(capsys.readouterr().out)["helpers"]["match"]["change"]
    assert (change["decode_changed"], change["fixed"], change["not_compared"]) == (0, 0, 1)
