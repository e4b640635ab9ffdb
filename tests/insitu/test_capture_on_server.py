"""Digest capture on the real server: clean arms are equal bit by bit, a planted fault is named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from klbench.core.alignment import align
from klbench.core.comparison import Status
from klbench.core.localisation import Localisation, localise
from klbench.core.trace import Arm, Phase, Trace
from klbench.engine.capture_control import CaptureControl
from klbench.engine.traces import read_trace
from klbench.zoo import plain_token_ids, seeded_prompts
from tests.insitu.zoo_server import ZooServer, zoo_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

NEW_TOKENS = 24
CHOSEN = 2


class Captured:
    """One helper's arms with request CHOSEN captured."""

    def __init__(self, server: ZooServer, folder: Path, helper: str, number: int) -> None:
        self._server = server
        self._number = number
        folder.mkdir(mode=0o700)
        control = CaptureControl(server.control_dir, server.nonce, [0])
        asyncio.run(control.open(folder, backend="digest", free_floor_bytes=1 << 20, size_cap_bytes=1 << 30))
        prompts = seeded_prompts(4, 300, 7, plain_token_ids())
        server.flush()
        if helper == "prefill_cache_hit":
            self._arm("w", prompts, 0)
        generated = self._arm("g", prompts, NEW_TOKENS, -1)
        server.flush()
        full = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, generated, strict=True)]
        scored = self._arm("s", full, 0, 0)
        asyncio.run(control.close())
        self.prompt_len = len(prompts[CHOSEN])
        self.cached = generated[CHOSEN]["meta_info"]["cached_tokens"]
        decoded = [entry[0] for entry in generated[CHOSEN]["meta_info"]["output_token_logprobs"]]
        cold = [entry[0] for entry in scored[CHOSEN]["meta_info"]["input_token_logprobs"]][-len(decoded) :]
        self.divergent = self.prompt_len + np.flatnonzero(
            np.array(decoded, dtype=np.float32) != np.array(cold, dtype=np.float32)
        )
        self.trace: Trace = read_trace(folder)

    def _arm(self, letter: str, input_ids: list[list[int]], new_tokens: int, start: int | None = None) -> Any:
        body: dict[str, Any] = {
            "rid": [
                f"klb-{self._server.nonce}-{self._number}{letter}{'+' if i == CHOSEN else ''}-{i}"
                for i in range(len(input_ids))
            ],
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        if start is not None:
            body |= {"return_logprob": True, "return_text_in_logprobs": False, "logprob_start_len": start}
        return json.loads(self._server.post("/generate", body))

    def located(self) -> Localisation:
        alignment = align(self.trace, CHOSEN, 0, {Arm.GENERATION: self.prompt_len + NEW_TOKENS - 2})
        assert alignment.proved, alignment.reason
        return localise(self.trace, [alignment], self.divergent)


def test_on_a_clean_server_all_rows_state_and_head_are_equal_in_both_arms(tmp_path: Path) -> None:
    with zoo_server("dense", ["--chunked-prefill-size", "128", "--page-size", "16"]) as server:
        for number, helper in enumerate(("match", "prefill_cache_hit"), 1):
            captured = Captured(server, tmp_path / helper, helper, number)
            trace = captured.trace
            assert trace.invalid is None
            assert (trace.backend, trace.observes_state, trace.observes_head) == ("digest", True, True)
            alignment = align(trace, CHOSEN, 0, {Arm.GENERATION: captured.prompt_len + NEW_TOKENS - 2})
            assert alignment.proved, alignment.reason
            status = alignment.comparison.status
            assert not (status == Status.DIFFERS).any()
            head = {trace.operators[o].module for o in alignment.comparison.operator.tolist()}
            assert {"lm_head", "logits", "logprob"} <= head
            logprob = [trace.operators[o].module == "logprob" for o in alignment.comparison.operator.tolist()]
            # The last row of the prompt and every decode step: as many as there are generated tokens.
            assert (status[np.array(logprob)] == Status.EQUAL).sum(axis=1).tolist() == [NEW_TOKENS] * 2
            assert captured.located().findings == ()
            # The last rows of the four prompts together, or of some of their chunks; all rows of a scoring.
            phases, arms = trace.row_phase[trace.head_row], trace.row_arm[trace.head_row]
            assert set(trace.head_rows[phases == Phase.DECODE].tolist()) == {4}
            generated = trace.head_rows[arms == Arm.GENERATION]
            assert 1 <= generated.min() <= generated.max() <= 4
            scored = trace.head_row[arms == Arm.SCORING]
            whole = trace.forward_rows[trace.row_forward[scored]]
            assert (trace.head_rows[arms == Arm.SCORING] == whole).all()
            assert len(scored) >= captured.prompt_len


def test_a_wrong_restore_is_named_with_its_layer_and_nothing_else(tmp_path: Path) -> None:
    with zoo_server("dense", fault="restore-key:layer=2,back=5") as server:
        captured = Captured(server, tmp_path / "trace", "prefill_cache_hit", 1)
        assert len(captured.divergent) == NEW_TOKENS

        (finding,) = captured.located().findings

    assert finding.kinds == ("state_restore",)
    assert finding.module == "model.layers.2.self_attn.attn"
    assert finding.first_position == captured.cached
    assert any(str(captured.cached - 5) in fact.text for fact in finding.evidence)
