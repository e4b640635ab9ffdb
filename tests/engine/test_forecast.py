"""What a capture is going to write: of the request's forwards only, or of every one."""

import pytest

from klbench.core.columns import HelperName
from klbench.engine.forecast import forecast, row_bytes
from tests.core.made_columns import make_columns

CONFIG = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
OUTPUT = 8


def asked(helper: HelperName = "match", requests: int = 3, prompt: int = 100, **more):
    logprobs = [[-1.0] * OUTPUT] * requests
    columns = make_columns(helper, prompt_len=[prompt] * requests, decode=logprobs, prefill=logprobs)
    options = {"max_new_tokens": OUTPUT, "generation_tokens": OUTPUT, "ranks": 1} | more
    return forecast(CONFIG, columns, 0, **options)


def test_a_dump_holds_whole_batches_and_digests_the_request_alone() -> None:
    dump, digest = asked(), asked(backend="digest")
    assert dump.rows == 300 + 324 + OUTPUT * 3
    assert digest.rows == 2 * 100 + OUTPUT + OUTPUT
    assert dump.size_bytes > dump.rows * row_bytes(CONFIG)
    assert digest.size_bytes * 10 < dump.size_bytes


@pytest.mark.parametrize("helper", ["match", "prefill_cache_hit", "decode_cache_hit"])
def test_a_servers_own_dumper_writes_every_forward_however_long_the_arms_are(helper: HelperName) -> None:
    small = asked(helper)
    assert asked(helper, every_forward=True).rows == small.rows
    # 64 prompts of 4000 tokens do not fit one prefill: ours stops with the request's own, theirs does not.
    own, every = (asked(helper, 64, 4000, every_forward=flag) for flag in (False, True))
    assert every.rows - own.rows == 2 * 64 * 4000 + 64 * OUTPUT - (2 * 16384 + 4000)
    assert every.forwards > own.forwards
    assert every.size_bytes > 5 * own.size_bytes


def test_each_rank_writes_its_own() -> None:
    assert asked(ranks=2).size_bytes == 2 * asked().size_bytes
