"""The zoo's models and prompts: the same everywhere, complete or absent, and text that reads as text."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from klbench.zoo import KINDS, Kind, make_model, plain_token_ids, prompts_sha256, seeded_prompts, zoo_root
from klbench.zoo.architectures import END_OF_TEXT_ID, VOCAB_SIZE, recipe
from klbench.zoo.models import bfloat16_bits
from klbench.zoo.tokenizer import tokenizer_json


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a model as raw bits, read by the format's definition."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    data = content[8 + size :]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], dtype="<u2").reshape(entry["shape"])
        for name, entry in header.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_wherever_it_is_made(kind: Kind, tmp_path: Path) -> None:
    first = make_model(kind, tmp_path / "a")
    second = make_model(kind, tmp_path / "b")
    assert first.name == second.name
    names = sorted(path.name for path in first.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_model_is_made_once_and_only_completely(tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(make_model("dense", tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]


def test_every_recipe_has_a_key_of_its_own() -> None:
    assert len({recipe(kind).key for kind in KINDS}) == len(KINDS)


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hybird"):
        make_model("hybird", tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_weights_are_finite_and_not_degenerate(tmp_path: Path) -> None:
    for kind in KINDS:
        for name, bits in _tensors(make_model(kind, tmp_path)).items():
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            assert np.isfinite(values).all(), name
            assert values.std() > 0, name


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KLBENCH_CACHE", str(tmp_path))
    assert zoo_root() == tmp_path / "zoo"
    monkeypatch.delenv("KLBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert zoo_root() == tmp_path / "cache" / "klbench" / "zoo"


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -2.5], dtype=np.float32)
    assert bfloat16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020]


def test_the_tokenizer_has_every_byte_and_the_comma_once() -> None:
    tokenizer = tokenizer_json()
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(END_OF_TEXT_ID))
    assert vocabulary[","] == ord(",")
    assert not [merge for merge in tokenizer["model"]["merges"] if "," in "".join(merge)]
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(END_OF_TEXT_ID, VOCAB_SIZE))


def test_the_tokenizer_reads_back_any_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(make_model("dense", tmp_path) / "tokenizer.json"))
    for text in (",", "the cache, hello prefill Zürich 東京 \x00\n", " a  b"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode(",").ids == [ord(",")]
    assert len(tokenizer.encode(" prefill attention").ids) == 2


def test_prompts_come_from_their_seed_alone() -> None:
    ids = plain_token_ids()
    prompts = seeded_prompts(32, 300, 7, ids)
    assert prompts == seeded_prompts(32, 300, 7, ids)
    assert prompts_sha256(prompts) == "1aa7e7541f96c63f28e5463a651020dc3f9d2d35beda422c19e601552b41d3ae"
    assert prompts_sha256(prompts) != prompts_sha256(seeded_prompts(32, 300, 8, ids))
    assert all(150 <= len(prompt) <= 450 for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 20
    assert {token for prompt in prompts for token in prompt} <= set(ids)


def test_no_two_prompts_share_a_prefix() -> None:
    prompts = seeded_prompts(64, 20, 3, 100)
    assert len({prompt[0] for prompt in prompts}) == 64


@pytest.mark.parametrize(("count", "tokens", "vocab"), [(0, 3, 9), (3, 0, 9), (3, 3, 0)])
def test_impossible_prompts_are_refused(count: int, tokens: int, vocab: int) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        seeded_prompts(count, tokens, 1, vocab)


def test_the_mixture_of_experts_has_heads_on_a_gpu_that_its_rotary_embedding_can_store(
    tmp_path: Path,
) -> None:
    there, here = recipe("moe", on_gpu=True), recipe("moe")
    shapes = {plan.name: plan.shape for plan in there.weights}
    assert there.config["head_dim"] == 128
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 128, 128)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (128,)
    assert here.config["head_dim"] == 32
    assert make_model("moe", tmp_path, on_gpu=True) != make_model("moe", tmp_path)
    assert recipe("dense", on_gpu=True) == recipe("dense")
