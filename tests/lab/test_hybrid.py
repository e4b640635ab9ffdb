"""A model with short convolutions on the real server: zero with real hits, faults of its state named."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from klbench.session.selftest.document import Document
from klbench.session.selftest.drive import Drive
from klbench.session.selftest.plan import CHUNKED, FOUR, Asked, Case, Station

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

FAULTS = ("conv-zeroed", "conv-write", "conv-checkpoint", "conv-chunk", "restore-key")


@pytest.fixture(scope="module")
def judged() -> Iterator[dict[str, Any]]:
    """One server whose prompts are cut into chunks, so that they leave checkpoints that can be restored."""
    cases = tuple(Case(fault, fault, "state", FOUR) for fault in FAULTS)
    stations = [Station("hybrid", CHUNKED, cases, (FOUR,))]
    with tempfile.TemporaryDirectory() as folder:
        document = Document(Asked(), stations, None)
        drive = Drive(stations, document, folder=Path(folder), new_tokens=24, say=lambda _: None)
        asyncio.run(drive.run())
        yield json.loads(json.dumps(document.as_dict()))


def test_all_helpers_read_exactly_zero_and_compared_restored_states(judged: dict[str, Any]) -> None:
    (clean,) = judged["clean"]
    assert (clean["answer"], clean["why"]) == ("right", "")
    for name, helper in clean["helpers"].items():
        assert (helper["status"], helper["divergent_tokens"]) == ("clean", 0), name
        assert helper["hits"] == (0 if name == "match" else 4), name


def test_faults_of_the_state_are_named_by_kind_layer_and_row(judged: dict[str, Any]) -> None:
    assert {case["fault"]: case["why"] for case in judged["cases"] if case["answer"] != "right"} == {}
    seen = {case["fault"]: case["located"][0] for case in judged["cases"]}
    assert list(seen) == list(FAULTS)
    for fault, located in seen.items():
        convolution = fault.startswith("conv-")
        assert located["layer"] == (0 if convolution else 1)
        assert located["module"].endswith("conv.conv1d" if convolution else "self_attn.attn")
        assert located["kind"] == ("state_write" if fault == "conv-write" else "state_restore")
    assert all(case["clean_again"] for case in judged["cases"])
