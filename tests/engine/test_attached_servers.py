"""Servers that klbench did not start, for real: digests through our plugin, dumps through sglang's own route.

One server does for both. It was given a path for its control folder that means nothing to any other process
(`/proc/self/cwd/...`), as a container's paths mean nothing outside: without a map klbench cannot find our
plugin in it, and has the dumper only.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from klbench.core.columns import HelperName
from klbench.core.findings import Finding
from klbench.engine.arms import run_arms
from klbench.engine.capture import Outcome, capture
from klbench.engine.capture_control import Backend, CaptureControl, RequestIds
from klbench.engine.captured_work import ServerSide, Work, first_divergent_offset
from klbench.engine.dump_process import DumpProcess
from klbench.engine.dumper_control import DUMPER_VARIABLES, find_dumper
from klbench.engine.fault_control import FaultControl
from klbench.engine.path_map import read_path_map
from klbench.engine.pythonpath import make_server_path, plugin_environment
from klbench.engine.server import Server
from klbench.zoo import plain_token_ids, seeded_prompts
from tests.insitu.zoo_server import ZooServer, zoo_server

PROMPTS = seeded_prompts(3, 80, 5, plain_token_ids())
NEW_TOKENS = 6
COMMA = (44,)
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def served() -> Iterator[ZooServer]:
    exports = {
        **DUMPER_VARIABLES,
        "KLBENCH_INSITU_DIR": "/proc/self/cwd/NONCE",
        "KLBENCH_FAULT_LAB": "1",
    }
    with zoo_server("dense", ["--disable-cuda-graph"], exports=exports) as server:
        yield server


def path_map(served: ZooServer) -> str:
    return f"/proc/self/cwd={served.control_dir.parent}"


class Attached:
    """Both ways into the one server, for as long as one event loop lasts."""

    def __init__(self, served: ZooServer, server: Server, folder: Path) -> None:
        self.server = server
        self.ids = RequestIds(served.nonce)
        self.ids.latest_pass = len(list(folder.parent.iterdir())) * 100
        self.folder = folder
        assert server.control_dir is not None
        self.control = CaptureControl(server.control_dir, served.nonce, [0], server.paths)
        self.faults = FaultControl(server.control_dir, served.nonce, [0])
        environment = plugin_environment(
            folder,
            "none",
            cpu=False,
            fault=None,
            base_env=os.environ,
            server_path=make_server_path(folder / "reader", cpu=False),
        )
        self.dumps = DumpProcess(Path(sys.executable), environment)

    async def side(self, backend: Backend) -> ServerSide:
        control: Any = self.control
        if backend == "dumper":
            control = await find_dumper(self.server.client, self.ids, self.server.paths, {})
        options = self.server.arm_options(COMMA)
        return ServerSide(
            self.server.client, control, self.ids, self.dumps, {"num_hidden_layers": 4}, options
        )

    async def locate(self, helper: HelperName, backends: tuple[Backend, ...]) -> list[Outcome]:
        columns = await run_arms(
            self.server.client,
            helper,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            rids=self.ids.next_pass(),
            options=self.server.arm_options(COMMA),
        )
        dirty = [r for r in range(columns.requests) if first_divergent_offset(columns, r) is not None]
        work = Work(helper, PROMPTS, dirty[0], columns, NEW_TOKENS)
        return [
            await capture(
                await self.side(backend), work, trace_dir=self.folder, backend=backend, numbers=False
            )
            for backend in backends
        ]


def both(
    served: ZooServer, folder: Path, fault: str, helper: HelperName, *backends: Backend
) -> list[Outcome]:
    """What each back end finds of a fault that is armed in the running server."""

    async def work() -> list[Outcome]:
        server = await Server.attach(
            served.url, attach_root=folder / "none", paths=read_path_map([path_map(served)])
        )
        try:
            attached = Attached(served, server, folder)
            await server.client.flush()
            await attached.faults.arm(fault)
            try:
                return await attached.locate(helper, backends)
            finally:
                await attached.faults.disarm()
        finally:
            await server.stop()

    return asyncio.run(work())


def place(finding: Finding) -> tuple[object, ...]:
    return finding.kind, finding.module, finding.arm, finding.first_position, finding.latent


@pytest.mark.server
@pytest.mark.timeout(3600)
class TestAttachedServer:
    @pytest.mark.parametrize(
        ("fault", "kind", "module"),
        [
            ("o_proj-rows:layer=1,rows=64", "operator", f"{LAYER}.self_attn.o_proj"),
            (
                "residual-gap:layer=1,rows=64",
                "gap",
                f"{LAYER}.self_attn.o_proj -> {LAYER}.post_attention_layernorm",
            ),
        ],
    )
    def test_operators_and_gaps_have_one_answer_by_both_back_ends(
        self, served: ZooServer, tmp_path: Path, fault: str, kind: str, module: str
    ) -> None:
        outcomes = both(served, tmp_path, fault, "match", "digest", "dumper")

        assert [outcome.alignment.proved for outcome in outcomes] == [True, True]
        digest, dumper = (outcome.findings for outcome in outcomes)
        assert (digest[0].kinds, digest[0].module) == ((kind,), module)
        assert [place(finding) for finding in digest] == [place(finding) for finding in dumper]
        assert dumper[0].kinds == (kind,)
        # Nothing of a dump is left, and its switch is as it was.
        assert not list(tmp_path.glob("dumps-*"))

    def test_the_head_and_the_state_are_not_observed_by_the_dumper(
        self, served: ZooServer, tmp_path: Path
    ) -> None:
        (head,) = both(served, tmp_path, "lm_head-rows:rows=64", "match", "dumper")
        assert head.findings[0].kinds == ("head", "not_observed")
        (state,) = both(served, tmp_path, "restore-key:layer=1,back=4", "prefill_cache_hit", "dumper")
        first = state.findings[0]
        assert first.module == f"{LAYER}.self_attn.attn"
        assert {"state_restore", "not_observed"} < set(first.kinds)
        assert {finding.grade for finding in (*head.findings, *state.findings)} == {"probable"}

    def test_the_command_line_finds_the_plugin_by_the_map_of_paths(
        self, served: ZooServer, tmp_path: Path
    ) -> None:
        traces = served.control_dir.parent / "traces"
        document = locate(served, tmp_path, 1, "--path-map", path_map(served), "--trace-dir", str(traces))
        first = document["findings"][0]
        assert (first["kind"], first["module"]) == ("operator", f"{LAYER}.self_attn.o_proj")
        assert (first["grade"], first["replay_M"]) == ("confirmed", 64)
        # The numbers came through the hooks of the server's own dumper.
        assert first["ulp_max"] > 0

    @pytest.mark.parametrize(
        ("more", "what", "next_step"),
        [
            (["--backend", "digests"], "cannot be captured", "KLBENCH_INSITU_DIR="),
            (["--path-map", "{map}", "--path-map", "/nowhere={tmp}"], "does not see /nowhere", "--path-map"),
            (
                ["--path-map", "{tmp}/else={tmp}/traces", "--trace-dir", "{tmp}/traces"],
                "dumper writes to",
                "--path-map",
            ),
        ],
    )
    def test_a_server_that_cannot_be_read_is_5_with_what_would_allow_it(
        self, served: ZooServer, tmp_path: Path, more: list[str], what: str, next_step: str
    ) -> None:
        arguments = [word.format(map=path_map(served), tmp=tmp_path) for word in more]
        document = locate(served, tmp_path, 5, *arguments)
        assert what in document["error"]["what"]
        assert next_step in document["error"]["next"]
        assert document["findings"] == []


def locate(served: ZooServer, folder: Path, code: int, *more: str) -> dict[str, Any]:
    """The document of `klbench locate` on the attached server with a fault in it; it must end with `code`."""
    arguments = [
        *("locate", "--url", served.url, "--yes-flush", "--helper", "match", "--json", "-"),
        *("--samples", "2", "--prompt-tokens", "80", "--max-new-tokens", "6", *more),
    ]
    environment = dict(os.environ) | {"KLBENCH_HOME": str(folder / "home")}
    faults = FaultControl(served.control_dir, served.nonce, [0])
    asyncio.run(faults.arm("o_proj-rows:layer=1,rows=64"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "klbench", *arguments], env=environment, capture_output=True, text=True
        )
    finally:
        asyncio.run(faults.disarm())
    assert done.returncode == code, done.stderr
    # Whoever's dumper is switched hears of its port.
    assert ("all interfaces of its machine" in done.stderr) == ("dumper writes to" in done.stdout)
    document: dict[str, Any] = json.loads(done.stdout)
    return document
