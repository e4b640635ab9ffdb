"""The real server on the CPU reads exactly zero, and a planted fault dirties exactly what its entry says.

The other models, chunked prefill, paged caches and faults: `python tests/insitu/zoo_server.py`.
"""

import time

import pytest
from zoo_server import ZooServer, zoo_server

from klbench.insitu.faults_catalogue import CATALOGUE, parse_fault
from klbench.zoo import Kind

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]


def _scheduler(server: ZooServer) -> dict[str, object]:
    presences = server.presences()
    assert {presence["role"] for presence in presences} >= {"launcher", "scheduler"}
    assert all(presence["error"] is None and presence["nonce"] == server.nonce for presence in presences)
    (scheduler,) = [presence for presence in presences if presence["role"] == "scheduler"]
    assert scheduler["stage"] == "model_loaded"
    assert scheduler["rank"] == 0
    return scheduler


@pytest.mark.parametrize(("kind", "flags"), [("moe", ()), ("swa", ("--chunked-prefill-size", "128"))])
def test_every_helper_reads_exactly_zero(kind: Kind, flags: tuple[str, ...]) -> None:
    with zoo_server(kind, flags) as server:
        scheduler = _scheduler(server)
        assert {"cpu_engine.batch_invariant_mode", "model_runner.load_model"} <= set(scheduler["hooks"])  # type: ignore[call-overload]
        for name, reading in server.helpers(samples=32, prompt_tokens=200, new_tokens=128).items():
            assert reading.avg_kl_div == 0.0, name
            assert reading.divergent == 0, name
            assert reading.tokens == 32 * 128, name
            assert reading.hits == (0 if name == "match" else 32), name
        assert server.fired() == []


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [
        ("restore-key", "dense", ("--chunked-prefill-size", "128", "--page-size", "16")),
        ("decode-window", "swa", ()),
    ],
)
def test_a_fault_dirties_what_it_says_and_proves_it(name: str, kind: Kind, flags: tuple[str, ...]) -> None:
    fault = CATALOGUE[name]
    with zoo_server(kind, flags, fault=name) as server:
        scheduler = _scheduler(server)
        assert scheduler["faults"] == [{"name": name, "params": dict(parse_fault(name).parameters)}]
        readings = server.helpers(samples=16, prompt_tokens=200, new_tokens=24)
        dirty = tuple(helper for helper, reading in readings.items() if reading.divergent)
        assert dirty == fault.truth.dirty_helpers
        (fired,) = _settled(server)
        assert fired["fault"] == name
        assert fired["count"] >= 16
        assert fired["first"]["rid"].startswith(f"klb-{server.nonce}-")
        if name == "decode-window":
            # The first 16 decode steps are clean: they score output tokens 1 to 16.
            assert min(readings["match"].first_offsets) >= 17


def _settled(server: ZooServer) -> list[dict[str, object]]:
    """The proof when nothing is added to it any more: the count is written with a delay of a second, and of
    more on a busy machine."""
    deadline = time.monotonic() + 60
    seen = server.fired()
    while time.monotonic() < deadline:
        time.sleep(1.2)
        if seen and server.fired() == seen:
            break
        seen = server.fired()
    return seen
