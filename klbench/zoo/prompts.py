"""Prompts from a seed: token ids only, the same on every machine.

Lengths are uniform between 0.5 and 1.5 times the asked length, as the helpers cut LongBench texts. As long as
there are no more prompts than ids, no two prompts begin with the same token: an empty cache stays without
hits inside one arm.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def prompt_lengths(count: int, prompt_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """[count] tokens of each of `seeded_prompts`, without drawing them."""
    return _lengths(np.random.Generator(np.random.PCG64(seed)), count, prompt_tokens)


def _lengths(random: np.random.Generator, count: int, prompt_tokens: int) -> npt.NDArray[np.int64]:
    return np.maximum(1, (prompt_tokens * random.uniform(0.5, 1.5, size=count)).astype(np.int64))


def seeded_prompts(count: int, prompt_tokens: int, seed: int, vocab: int | Sequence[int]) -> list[list[int]]:
    """`count` prompts of 0.5 to 1.5 times `prompt_tokens` token ids each.

    `vocab` is either the ids to draw from or how many ids, counted from 0. Raises ValueError where no prompt
    can be made.
    """
    ids = np.arange(vocab) if isinstance(vocab, int) else np.asarray(vocab, dtype=np.int64)
    if count < 1 or prompt_tokens < 1 or ids.size == 0:
        raise ValueError(f"no prompts from count={count}, prompt_tokens={prompt_tokens}, {ids.size} ids")
    random = np.random.Generator(np.random.PCG64(seed))
    lengths = _lengths(random, count, prompt_tokens)
    first = random.permutation(ids)
    prompts = []
    for index, length in enumerate(lengths):
        prompt = random.choice(ids, size=int(length))
        prompt[0] = first[index % ids.size]
        prompts.append([int(token) for token in prompt])
    return prompts


def prompts_sha256(prompts: Sequence[Sequence[int]]) -> str:
    """The hexadecimal SHA-256 of the prompts' compact JSON: equal if and only if the prompts are."""
    text = json.dumps([list(prompt) for prompt in prompts], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
