"""Prompt files are checked line by line, and nothing reaches a server that would end it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.engine import prompts as subject
from klbench.engine.facts import ServerFacts
from klbench.engine.prompts import check_fits, load_prompts, read_prompt_file, scoring_bytes
from klbench.errors import UndecidedError, UsageError


class Tokenizer:
    """Encodes a text as its bytes."""

    async def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [[*([1] if add_special_tokens else []), *text.encode()] for text in texts]


def server(vocab_size: int | None = 256, model: str | None = "/models/m", package: Path | None = None) -> Any:
    python = SimpleNamespace(path=Path("/no/python"), sglang_path=package or Path("/no/sglang"))
    return SimpleNamespace(
        facts=ServerFacts(vocab_size=vocab_size, model=model),
        plan=SimpleNamespace(is_demo=False, python=python),
        client=Tokenizer(),
    )


async def test_a_file_may_hold_texts_and_ids_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "ab"}\n\n{"input_ids": [5, 6]}\n{"text": "c", "id": 7}\n')
    found = await load_prompts(server(), str(file), samples=3)
    assert found.prompts == ((1, 97, 98), (5, 6), (1, 99))
    assert found.as_dict()["source"] == str(file)
    assert len(found.sha256) == 64


async def test_too_few_and_repeated_prompts_are_said(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"input_ids": [5]}\n{"input_ids": [5]}\n')
    found = await load_prompts(server(), str(file), samples=3)
    assert "holds 2 prompts, 3 were asked for" in found.notes[0]
    assert "alike" in found.notes[1]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b'{"text": 3}',
        b'{"text": ""}',
        b'{"text": "a", "input_ids": [1]}',
        b'{"input_ids": []}',
        b'{"input_ids": [true]}',
        b'{"input_ids": [1.5]}',
        b'{"input_ids": [-1]}',
        b'{"input_ids": [99999999999]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UsageError) as error:
        read_prompt_file(file, 10)
    assert error.value.what.startswith(f"{file}:2 ")


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_LONGEST_LINE_BYTES", 1000)
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"text": "' + b"a" * 2000)
    with pytest.raises(UsageError, match=r":1 is no prompt"):
        read_prompt_file(file, 1)


def test_an_empty_or_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompt_file(tmp_path / "empty", 1)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompt_file(tmp_path / "missing", 1)


async def test_ids_that_would_end_the_server_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"input_ids": [5]}\n{"input_ids": [256]}\n')
    with pytest.raises(UsageError, match=r"prompt 1 .* ids that the model does not have"):
        await load_prompts(server(vocab_size=256), str(file), samples=2)


async def test_the_same_seed_gives_the_same_prompts_without_special_tokens() -> None:
    one, two = [await load_prompts(server(1000), samples=4, prompt_tokens=50, seed=9) for _ in range(2)]
    assert one.sha256 == two.sha256
    assert min(min(p) for p in one.prompts) >= 10
    assert max(max(p) for p in one.prompts) < 900


async def test_with_an_unknown_vocabulary_the_servers_tokenizer_gives_the_ids() -> None:
    found = await load_prompts(server(vocab_size=None), samples=2, prompt_tokens=20)
    assert {token for prompt in found.prompts for token in prompt} <= set(b"abcdefghijklmnopqrstuvwxyz")
    assert "vocabulary is unknown" in found.notes[0]


async def test_longbench_comes_from_sglangs_cache_file_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sglang" / "longbench"
    folder.mkdir(parents=True)
    (folder / "input_ids__models_m_3000_48.json").write_text(json.dumps([[1, 2], [3], [4]]))
    found = await load_prompts(server(), "longbench", samples=2, prompt_tokens=3000)
    assert found.prompts == ((1, 2), (3,))
    with pytest.raises(UndecidedError, match="which model"):
        await load_prompts(server(model=None), "longbench", samples=2)


async def test_longbench_of_older_versions_lies_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    folder = tmp_path / "sglang" / "test" / ".longbench_cache"
    folder.mkdir(parents=True)
    (folder / "input_ids__models_m_3000_64.json").write_text(json.dumps([[7]] * 64))
    found = await load_prompts(server(package=tmp_path / "sglang"), "longbench", samples=64)
    assert len(found.prompts) == 64


def test_prompts_must_fit_with_what_they_generate() -> None:
    check_fits([100], ["match"], 27, 128)
    with pytest.raises(UsageError, match="prompt 0 does not fit"):
        check_fits([100], ["match", "decode_cache_hit"], 27, 128)
    check_fits([10_000], ["match"], 1, None)


@pytest.mark.parametrize(
    ("vocab_size", "prefill_tokens", "held"),
    [(152_000, None, 2 * 4 * 152_000 * 37), (152_000, 10, 2 * 4 * 152_000 * 10), (None, 10, None)],
)
def test_what_scoring_holds_is_estimated(
    vocab_size: int | None, prefill_tokens: int | None, held: int | None
) -> None:
    prompts = [[1] * 10, [1] * 17]
    estimate = scoring_bytes(prompts, 5, vocab_size=vocab_size, prefill_tokens=prefill_tokens)
    assert estimate == held
