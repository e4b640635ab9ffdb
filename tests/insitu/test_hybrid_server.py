"""The real server computes a short-convolution hybrid as transformers does, cold, decoding and restored.

Everything in float32, the state of the convolutions too (sglang keeps it in bfloat16 unless told): against
transformers in float64 an error of the weights' rounding would show at 1e-3, a wrong or lost state at 0.1.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from zoo_server import ZooServer, zoo_server  # noqa: E402

from klbench.zoo import make_model, plain_token_ids, seeded_prompts, zoo_root  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

CHUNK = 64
NEW_TOKENS = 12
PROMPTS = seeded_prompts(4, 150, 11, plain_token_ids())

# A float32 step is 6e-8 of a value. Logits of up to 20, behind four layers that round some ten times each,
# are right to some 1e-5; bfloat16 anywhere on the way would give 1e-3 and more.
TOLERANCE_NATS = 2e-5


@pytest.fixture(scope="module")
def server() -> Iterator[ZooServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
        flags = ("--dtype", "float32", "--max-mamba-cache-size", "256", "--chunked-prefill-size", str(CHUNK))
        with zoo_server("hybrid", flags) as running:
            yield running


@pytest.fixture(scope="module")
def reference() -> Any:
    folder = make_model("hybrid", zoo_root())
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def _expected(reference: Any, tokens: list[int]) -> list[float]:
    """The log-probability of each token but the first, given those before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits[:-1], dim=-1)
    picked: list[float] = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    return picked


def _worst(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    assert all(math.isfinite(value) for value in found)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def test_cold_prompts_cut_into_chunks_score_as_in_transformers(server: ZooServer, reference: Any) -> None:
    server.flush()
    scored = server.generate(PROMPTS, 0, return_logprob=True, logprob_start_len=0)
    for prompt, result in zip(PROMPTS, scored, strict=True):
        assert result["meta_info"]["cached_tokens"] == 0
        found = [entry[0] for entry in result["meta_info"]["input_token_logprobs"]][1:]
        assert _worst(found, _expected(reference, prompt)) < TOLERANCE_NATS


def test_decoding_and_restored_states_score_as_in_transformers(server: ZooServer, reference: Any) -> None:
    """First from an empty cache, then on a checkpoint that a chunk's end left, then behind a whole turn."""
    server.flush()
    turns = PROMPTS
    for turn in ("cold", "restored", "second"):
        results = server.generate(turns, NEW_TOKENS, return_logprob=True, logprob_start_len=-1)
        cached = [result["meta_info"]["cached_tokens"] for result in results]
        if turn == "cold":
            assert cached == [0] * 4
        elif turn == "restored":
            assert sum(tokens > 0 for tokens in cached) >= 3
        for tokens, result in zip(turns, results, strict=True):
            found = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
            expected = _expected(reference, tokens + result["output_ids"])[-NEW_TOKENS:]
            assert _worst(found, expected) < TOLERANCE_NATS, (turn, cached)
        if turn == "restored":
            turns = [
                prompt + result["output_ids"] + [44] for prompt, result in zip(PROMPTS, results, strict=True)
            ]
    assert [hit > len(prompt) + 1 for hit, prompt in zip(cached, PROMPTS, strict=True)] == [True] * 4
