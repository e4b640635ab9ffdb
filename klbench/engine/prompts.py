"""The prompts of a run: from a seed, from a file, or sglang's own LongBench choice; hashed into every result.

Ids that the model does not have kill a sglang scheduler, and prompts that do not fit are refused one by one,
so both are checked before anything is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klbench.core.columns import HelperName
from klbench.engine.server_python import ServerPython, find_server_python
from klbench.errors import DeadlineError, UndecidedError, UsageError
from klbench.zoo import plain_token_ids, prompts_sha256, seeded_prompts

if TYPE_CHECKING:
    # Reading recorded prompts must not cost what talking to servers costs: 0.1 s of imports.
    from klbench.engine.server import Server

_LONGEST_LINE_BYTES = 16 << 20
_LARGEST_FILE_BYTES = 1 << 30
_LONGBENCH_DEFAULT = 48
_LONGBENCH_LIMIT_S = 900.0
_TOKENIZE_BATCH = 64


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Token ids of the prompts. `source` says where they come from, `notes` what a user should know."""

    source: str
    prompts: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return prompts_sha256(self.prompts)

    def as_lists(self) -> list[list[int]]:
        return [list(prompt) for prompt in self.prompts]

    def as_dict(self) -> dict[str, Any]:
        """The `prompts` object of klbench.run/1."""
        return {"source": self.source, "count": len(self.prompts), "sha256": self.sha256}


async def load_prompts(
    server: Server,
    source: str | None = None,
    *,
    samples: int = 32,
    prompt_tokens: int = 3000,
    seed: int = 1,
) -> PromptSet:
    """The prompts for a run on `server`: `source` is None (seeded), "longbench", or the path of a file.

    Raises UsageError for a file that is not what it should be, naming file and line.
    """
    if samples < 1 or prompt_tokens < 1:
        raise UsageError("a run needs at least one prompt of at least one token")
    if source is None:
        ids, note = await _ids_to_draw(server)
        prompts = seeded_prompts(samples, prompt_tokens, seed, ids)
        found = PromptSet(f"seed {seed}, {prompt_tokens} tokens", _frozen(prompts), (note,) if note else ())
    elif source == "longbench":
        found = await _longbench(server, samples, prompt_tokens)
    else:
        found = await _from_file(server, Path(source), samples)
    _check_ids(found, server.facts.vocab_size)
    return found


def check_fits(
    lengths: Iterable[int],
    helpers: Iterable[HelperName],
    max_new_tokens: int,
    context_length: int | None,
) -> None:
    """Raises UsageError if a prompt of `lengths` (tokens) and what it generates is longer than the model's
    context."""
    if context_length is None:
        return
    turns = 2 if "decode_cache_hit" in tuple(helpers) else 1
    for index, length in enumerate(lengths):
        longest = length + turns * max_new_tokens + turns
        if longest > context_length:
            raise UsageError(
                f"prompt {index} does not fit: {length} tokens and {turns} x {max_new_tokens} generated "
                f"ones are more than the context of {context_length}",
                next="use fewer --prompt-tokens or --max-new-tokens",
            )


def scoring_bytes(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    vocab_size: int | None,
    prefill_tokens: int | None,
) -> int | None:
    """The most memory that the logits of one scoring forward take beside the model, in bytes; None where the
    vocabulary is unknown.

    Two float32 tensors, logits and their log-softmax, of rows x vocabulary; a forward holds at most
    `prefill_tokens` rows (the server's chunked_prefill_size) of these sequences.
    """
    if vocab_size is None:
        return None
    rows = sum(len(prompt) + max_new_tokens for prompt in prompts)
    return 2 * 4 * vocab_size * (rows if prefill_tokens is None else min(rows, prefill_tokens))


def _frozen(prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(prompt) for prompt in prompts)


def _check_ids(found: PromptSet, vocab_size: int | None) -> None:
    for index, prompt in enumerate(found.prompts):
        if not prompt:
            raise UsageError(f"prompt {index} of {found.source} is empty")
        if min(prompt) < 0 or (vocab_size is not None and max(prompt) >= vocab_size):
            raise UsageError(
                f"prompt {index} of {found.source} holds ids that the model does not have",
                why=f"ids go from 0 to {vocab_size - 1 if vocab_size else 'the vocabulary size'}; another "
                "one would end the server",
            )


async def _ids_to_draw(server: Server) -> tuple[list[int], str | None]:
    """The token ids that seeded prompts are made of: no special ones, which may mean something."""
    if server.plan is not None and server.plan.is_demo:
        return list(plain_token_ids()), None
    vocab = server.facts.vocab_size
    if vocab is not None:
        # Special tokens stand at either end of a vocabulary.
        return list(range(vocab // 100, max(vocab // 100 + 1, vocab * 9 // 10))), None
    words = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    ids: set[int] = set()
    for batch in _batches(words):
        for tokens in await server.client.tokenize(batch, add_special_tokens=False):
            ids.update(tokens)
    if not ids:
        raise UndecidedError(
            "the server's tokenizer gave no token ids", next="give the prompts with --prompts FILE"
        )
    return sorted(ids), "the vocabulary is unknown: prompts are made of the tokens of two-letter words"


def _batches(texts: list[str]) -> Iterable[list[str]]:
    return (texts[start : start + _TOKENIZE_BATCH] for start in range(0, len(texts), _TOKENIZE_BATCH))


async def _from_file(server: Server, path: Path, samples: int) -> PromptSet:
    entries = await asyncio.to_thread(read_prompt_file, path, samples)
    texts = [entry for entry in entries if isinstance(entry, str)]
    tokens: list[list[int]] = []
    for batch in _batches(texts):
        tokens += await server.client.tokenize(batch)
    encoded = iter(tokens)
    prompts = [next(encoded) if isinstance(entry, str) else entry for entry in entries]
    notes = []
    if len(prompts) < samples:
        notes.append(f"{path} holds {len(prompts)} prompts, {samples} were asked for")
    if len({tuple(prompt) for prompt in prompts}) < len(prompts):
        notes.append(f"{path} holds prompts that are alike: they hit the cache inside one arm")
    return PromptSet(str(path), _frozen(prompts), tuple(notes))


def read_prompt_file(path: Path, most: int) -> list[str | list[int]]:
    """The first `most` prompts of a file of JSON lines: {"text": "..."} or {"input_ids": [...]} each.

    Raises UsageError that names the file and the line.
    """
    entries: list[str | list[int]] = []
    try:
        with path.expanduser().open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE_BYTES + 1)
                if not line or len(entries) == most:
                    break
                if len(line) > _LONGEST_LINE_BYTES:
                    raise _refused(path, number, f"the line is longer than {_LONGEST_LINE_BYTES >> 20} MiB")
                if line.strip():
                    entries.append(_entry(path, number, line))
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from None
    if not entries:
        raise UsageError(f"{path} holds no prompt", next='write one JSON object a line: {"text": "..."}')
    return entries


def _refused(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        f"{path}:{number} is no prompt",
        why=why,
        next='write one JSON object a line: {"text": "..."} or {"input_ids": [1, 2, 3]}',
    )


def _entry(path: Path, number: int, line: bytes) -> str | list[int]:
    try:
        content = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refused(path, number, str(error)[:200]) from None
    if not isinstance(content, dict) or len(content.keys() & {"text", "input_ids"}) != 1:
        raise _refused(path, number, "it must hold either text or input_ids")
    text, ids = content.get("text"), content.get("input_ids")
    if isinstance(text, str) and text:
        return text
    if isinstance(ids, list) and ids and all(type(token) is int and 0 <= token < 2**31 for token in ids):
        return ids
    raise _refused(path, number, "text must be words, input_ids a list of token ids")


# sglang's own choice. Its texts are cut to random lengths without a seed: the same only from the cache file.


async def _longbench(server: Server, samples: int, prompt_tokens: int) -> PromptSet:
    model = server.facts.model
    if model is None:
        raise UndecidedError("the server does not say which model it runs", next="use --prompts FILE")
    count = max(samples, _LONGBENCH_DEFAULT)
    python = server.plan.python if server.plan is not None else await find_server_python()
    cache = _longbench_cache(python, model, prompt_tokens, count)
    if cache is None:
        await _fill_longbench(python, model, prompt_tokens, count)
        cache = _longbench_cache(python, model, prompt_tokens, count)
        if cache is None:
            raise UndecidedError("sglang's own function left no LongBench file", next="use --prompts FILE")
    prompts = await asyncio.to_thread(_read_longbench, cache)
    return PromptSet(f"longbench, {prompt_tokens} tokens", _frozen(prompts[:samples]), (f"from {cache}",))


def _longbench_cache(python: ServerPython, model: str, prompt_tokens: int, count: int) -> Path | None:
    safe = model.replace("/", "_").replace("\\", "_")
    name = f"input_ids_{safe}_{prompt_tokens}_{count}.json"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    # Older versions keep it inside the package.
    for folder in (user / "sglang" / "longbench", python.sglang_path / "test" / ".longbench_cache"):
        if (folder / name).is_file():
            return folder / name
    return None


def _read_longbench(path: Path) -> list[list[int]]:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise UsageError(f"{path} is larger than any prompt file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}", why=str(error)[:200]) from None
    if not isinstance(content, list) or not all(
        isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in content
    ):
        raise UsageError(
            f"{path} is no list of lists of token ids", next="remove it, so that it is made again"
        )
    return content


async def _fill_longbench(python: ServerPython, model: str, prompt_tokens: int, count: int) -> None:
    """Lets sglang fetch and cut LongBench: needs a network and the `datasets` package there."""
    source = (
        "import sys; from sglang.test.kl_test_utils import get_input_ids; "
        "get_input_ids(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    )
    process = await asyncio.create_subprocess_exec(
        *(str(python.path), "-c", source, model, str(prompt_tokens), str(count)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, err = await asyncio.wait_for(process.communicate(), _LONGBENCH_LIMIT_S)
    except TimeoutError:
        raise DeadlineError(
            f"sglang did not fetch LongBench within {_LONGBENCH_LIMIT_S:.0f} s", next="use --prompts FILE"
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        words = err.decode("utf-8", errors="replace").strip().splitlines()
        raise UndecidedError(
            "sglang's own function could not fetch LongBench",
            why=words[-1] if words else f"exit code {process.returncode}",
            next="use --prompts FILE, or leave --prompts out for seeded prompts",
        )
