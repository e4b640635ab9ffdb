"""The CPU's short convolutions: what transformers computes, however and beside whomever they are cut."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers.models.lfm2 import modeling_lfm2  # noqa: E402

from klbench.insitu.cpu_conv import PAD_SLOT_ID, causal_conv1d_fn, causal_conv1d_update  # noqa: E402
from klbench.zoo import make_model, plain_token_ids, seeded_prompts  # noqa: E402

DIM, WIDTH, SLOTS = 6, 3, 7


def _fn(x: Any, weight: Any, bias: Any, states: Any, slots: list[int], cuts: list[int], **more: Any) -> Any:
    return causal_conv1d_fn(
        x,
        weight,
        bias,
        query_start_loc=torch.tensor(cuts, dtype=torch.int32),
        cache_indices=torch.tensor(slots),
        conv_states=states,
        **{"activation": None, **more},
    )


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_sequences_side_by_side_are_what_transformers_computes_for_each(
    width: int, activation: str | None, with_bias: bool
) -> None:
    torch.manual_seed(0)
    cuts = [0, 1, 6, 8, 20]
    x = torch.randn(DIM, cuts[-1], dtype=torch.float64)
    weight = torch.randn(DIM, width, dtype=torch.float64)
    bias = torch.randn(DIM, dtype=torch.float64) if with_bias else None
    states = torch.randn(SLOTS, DIM, width - 1, dtype=torch.float64)
    slots = [3, 0, 5, 1]
    untouched = states[[2, 4, 6]].clone()
    found = _fn(x, weight, bias, states, slots, cuts, activation=activation)
    for (start, end), slot in zip(pairwise(cuts), slots, strict=True):
        own = x[None, :, start:end]
        expected = modeling_lfm2.causal_conv1d_fn(own, weight, bias, activation=activation)
        torch.testing.assert_close(found[:, start:end], expected[0], rtol=1e-14, atol=1e-14)
        padded = torch.cat([torch.zeros(DIM, width - 1, dtype=torch.float64), own[0]], dim=-1)
        assert torch.equal(states[slot], padded[:, -(width - 1) :])
    assert torch.equal(states[[2, 4, 6]], untouched)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_decode_step_is_what_transformers_computes_and_leaves_the_same_state(
    activation: str | None,
) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, DIM, dtype=torch.float64)
    weight, bias = torch.randn(DIM, WIDTH, dtype=torch.float64), torch.randn(DIM, dtype=torch.float64)
    states = torch.randn(SLOTS, DIM, WIDTH - 1, dtype=torch.float64)
    slots = [6, 2, 0, 5]
    theirs = states[slots].clone()
    expected = modeling_lfm2.causal_conv1d_update(x[..., None], theirs, weight, bias, activation)
    untouched = states[[1, 3, 4]].clone()
    found = causal_conv1d_update(
        x, states, weight, bias, activation, conv_state_indices=torch.tensor(slots, dtype=torch.int32)
    )
    torch.testing.assert_close(found, expected[..., 0], rtol=1e-14, atol=1e-14)
    assert torch.equal(states[slots], theirs)
    assert torch.equal(states[[1, 3, 4]], untouched)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_however_a_sequence_is_cut_every_bit_is_the_same(data: st.DataObject) -> None:
    """Chunks of any size and decode steps, among any neighbours, in the type that the server uses."""
    tokens = data.draw(st.integers(1, 24))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    x = torch.randn(DIM, tokens).bfloat16()
    weight = torch.randn(DIM, WIDTH).bfloat16()
    states = torch.randn(SLOTS, DIM, WIDTH - 1).bfloat16()
    whole_states = states.clone()
    whole = _fn(x, weight, None, whole_states, [4], [0, tokens])
    pieces, at = [], 0
    while at < tokens:
        if at and data.draw(st.booleans()):
            other = torch.randn(1, DIM).bfloat16()
            both = torch.cat([other, x[:, at][None]])
            step = causal_conv1d_update(both, states, weight, conv_state_indices=torch.tensor([1, 4]))
            pieces.append(step[1][:, None])
            at += 1
            continue
        size = data.draw(st.integers(1, tokens - at))
        neighbour = torch.randn(DIM, data.draw(st.integers(1, 5))).bfloat16()
        before = neighbour.shape[1]
        packed = torch.cat([neighbour, x[:, at : at + size]], dim=-1)
        resumed = torch.tensor([False, at > 0])
        found = _fn(
            packed, weight, None, states, [2, 4], [0, before, before + size], has_initial_state=resumed
        )
        pieces.append(found[:, before:])
        at += size
    assert torch.equal(torch.cat(pieces, dim=-1), whole)
    assert torch.equal(states[4], whole_states[4])


def test_padding_rows_touch_no_state() -> None:
    states = torch.ones(SLOTS, DIM, WIDTH - 1)
    x, weight = torch.ones(DIM, 4), torch.ones(DIM, WIDTH)
    found = _fn(x, weight, None, states, [PAD_SLOT_ID, 2], [0, 2, 4])
    assert (found[:, :2] == 0).all()
    assert (states[[0, 1, 3, 4, 5, 6]] == 1).all()
    step = causal_conv1d_update(
        torch.ones(2, DIM), states, weight, conv_state_indices=torch.tensor([PAD_SLOT_ID, 3])
    )
    assert (step[0] == 0).all()
    assert (step[1] == 3).all()


def test_what_is_not_there_says_so_by_name() -> None:
    x, weight = torch.ones(DIM, 4), torch.ones(DIM, WIDTH)
    with pytest.raises(NotImplementedError, match="block_table"):
        _fn(x, weight, None, None, [0], [0, 4], block_table=torch.ones(1))
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        causal_conv1d_update(x.T, torch.ones(SLOTS, DIM, 2), weight, cache_seqlens=torch.ones(4))
    with pytest.raises(NotImplementedError, match="activation gelu"):
        _fn(x, weight, None, None, [0], [0, 4], activation="gelu")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The zoo's hybrid in transformers, in float64."""
    folder = make_model("hybrid", tmp_path_factory.mktemp("zoo"))
    assert json.loads((Path(folder) / "config.json").read_text())["layer_types"].count("conv") == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(model).__name__ == "Lfm2ForCausalLM"
    return model.eval()


def _logits(model: Any, prompt: list[int], steps: int) -> Any:
    """Prefill of all but the last `steps` tokens, then one token at a time: float64 [tokens, vocabulary]."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        done = model(ids[:, : len(prompt) - steps], use_cache=True)
        found, cache = [done.logits[0]], done.past_key_values
        for at in range(len(prompt) - steps, len(prompt)):
            done = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            found.append(done.logits[0])
    return torch.cat(found)


def test_with_our_convolutions_the_whole_model_of_transformers_gives_its_own_logits(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both phases of the whole network in float64, where only the order of three products may differ.

    An ulp there is 2e-16; four layers and logits of about 10 make less than 1e-12 of it.
    """
    (prompt,) = seeded_prompts(1, 60, 5, plain_token_ids())
    expected = _logits(reference, prompt, steps=12)
    calls: list[str] = []

    def fn(x: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
        calls.append("fn")
        tokens = x.shape[-1]
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        return causal_conv1d_fn(x[0], weight, bias, query_start_loc=starts, activation=activation)[None]

    def update(x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        calls.append("update")
        return causal_conv1d_update(x, state, weight, bias, activation)

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", fn)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_update", update)
    found = _logits(reference, prompt, steps=12)
    assert (calls.count("fn"), calls.count("update")) == (2, 2 * 12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    # The tolerance means something: a state that is lost between prefill and decode is seen.
    monkeypatch.setattr(
        modeling_lfm2, "causal_conv1d_update", lambda x, state, *rest: update(x, state.zero_(), *rest)
    )
    assert float((_logits(reference, prompt, steps=12) - expected).abs().max()) > 0.1
