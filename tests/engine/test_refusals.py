"""What cannot be compared or captured is refused with its reason, before anything is asked of the server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from klbench.engine import server as server_module
from klbench.engine.capture_control import RequestIds
from klbench.engine.client import ServerClient
from klbench.engine.dumper_control import find_dumper
from klbench.engine.facts import read_facts
from klbench.engine.path_map import SAME_PATHS
from klbench.engine.server import Server
from klbench.engine.versions import doubt_about
from klbench.errors import KlbenchError, UndecidedError
from klbench.session.locating import check_can_capture
from tests.engine.test_client import Scripted, scripted

__all__ = ["scripted"]

NOBODY = "http://127.0.0.1:1"


def server(info: dict[str, Any] | None = None, **facts: Any) -> Server:
    known = replace(read_facts(info or {}, {}), **facts)
    return Server(
        url=NOBODY,
        client=ServerClient(NOBODY),
        facts=known,
        info=info or {},
        plan=None,
        process=None,
        launch_s=0.0,
        ready_to_capture=False,
    )


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculatively"),
        ({"speculative_algorithm": "NGRAM"}, "speculatively"),
        ({"disaggregation_mode": "prefill"}, "one half of a pair"),
        ({"disaggregation_mode": "decode"}, "one half of a pair"),
        ({"preferred_sampling_params": '{"top_p": 0.9}'}, "top_p"),
        ({"preferred_sampling_params": '{"frequency_penalty": 0.1}'}, "frequency_penalty"),
        ({"preferred_sampling_params": '{"temperature": 0.7, "regex": "a+"}'}, "regex"),
    ],
    ids=["eagle", "ngram", "prefill-role", "decode-role", "top-p", "penalty", "grammar"],
)
def test_settings_that_make_the_two_paths_incomparable_are_refused(info: dict[str, Any], word: str) -> None:
    with pytest.raises(UndecidedError) as refused:
        server(info).check_comparable()
    assert word in refused.value.what
    assert refused.value.why
    assert refused.value.next


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"speculative_algorithm": None, "disaggregation_mode": "null"},
        {"preferred_sampling_params": '{"temperature": 0.7}'},
    ],
)
def test_settings_that_do_no_harm_are_not(info: dict[str, Any]) -> None:
    server(info).check_comparable()


def test_one_rank_of_a_data_parallel_server_takes_all_arms() -> None:
    assert server(dp_size=2).arm_options().routed_dp_rank == 0
    assert server(dp_size=1).arm_options().routed_dp_rank is None


def test_a_server_with_graphs_is_not_captured_silently() -> None:
    with pytest.raises(KlbenchError) as refused:
        check_can_capture(server(cuda_graphs=True), None)
    assert "KLBENCH_INSITU_DIR" in refused.value.next


async def test_a_server_without_the_dumpers_route_has_no_dumper(scripted: Scripted) -> None:
    async with scripted.client() as client:
        assert await find_dumper(client, RequestIds("fade"), SAME_PATHS, {}) is None
    assert [path for _, path, *_ in scripted.asked] == ["/dumper/get_state"]


@pytest.mark.parametrize(
    ("version", "word"),
    [
        ("0.5.16", "older than 0.5.17"),
        ("0.5.9.post2", "older"),
        ("0.6.0rc1", "newer than"),
        (None, "none"),
        ("main", "main"),
    ],
)
def test_another_version_of_sglang_is_said(version: str | None, word: str) -> None:
    assert word in (doubt_about(version) or "")


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20", "0.5.23"])
def test_a_known_version_is_not(version: str) -> None:
    assert doubt_about(version) is None


async def test_weights_replaced_between_the_arms_are_no_divergence(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted
) -> None:
    ran = []

    async def arms(*_: Any, **__: Any) -> str:
        ran.append(1)
        return "columns"

    monkeypatch.setattr(server_module, "run_arms", arms)
    subject = server()
    subject.client = scripted.client()
    scripted.says("/model_info", {"model_path": "/m", "weight_version": "1"})
    assert await subject.run_helper("match", [[1]], max_new_tokens=1) == "columns"
    versions = iter(["1", "2"])
    scripted.answers["/model_info"] = lambda: (
        200,
        json.dumps({"model_path": "/m", "weight_version": next(versions)}).encode(),
    )
    with pytest.raises(UndecidedError, match="weights were replaced") as refused:
        await subject.run_helper("match", [[1]], max_new_tokens=1)
    assert "weight_version 1" in refused.value.why
    assert "weight_version 2" in refused.value.why
    await subject.client.close()


@pytest.mark.parametrize(
    ("facts", "word", "why"),
    [
        ({"pp_size": 2}, "2 pipeline stages", "does not put together"),
        ({"nnodes": 2, "tp_size": 16}, "2 nodes", "0 of 16 ranks"),
    ],
)
def test_a_model_of_which_only_a_part_is_seen_is_not_captured(
    facts: dict[str, Any], word: str, why: str
) -> None:
    with pytest.raises(UndecidedError) as refused:
        check_can_capture(server(cuda_graphs=False, **facts), None)
    assert word in refused.value.what
    assert why in refused.value.why
    assert "the helpers run as it is" in refused.value.next
