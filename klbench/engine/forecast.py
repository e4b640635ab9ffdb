"""How much a capture writes, before it is started.

Counted on a Qwen3 layer: 17 tensors of hidden width, 8 of the width of all query heads, 8 of all key heads,
6 of the MLP's width; two bytes an element, about 1.5 KB around each file. Other architectures are near it.
Digests take 16 bytes a row; about half of a forward's tensors are passed on unchanged and stored once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klbench.core.columns import HelperColumns
from klbench.engine.capture_control import Backend
from klbench.engine.compositions import Composition

_FILES_PER_LAYER = 42
_FILES_PER_FORWARD = 20
_FILE_BYTES = 1500
_DIGEST_BYTES = 8
_DIGEST_FILES = 3
_STATE_ROW_BYTES = 160
"""K and V of one layer: a digest of each as written and of all that was read, with places and slots."""
_LARGEST_PREFILL = 16384


@dataclass(frozen=True, slots=True)
class Forecast:
    """`rows` are what is written of the captured forwards: rows of whole batches by the dumper, of the
    request alone by digests."""

    forwards: int
    rows: int
    files: int
    size_bytes: int


def row_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one row in all tensors of a forward."""
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config

    def number(name: str, default: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    hidden = number("hidden_size", 4096)
    heads = number("num_attention_heads", 32)
    head_dim = number("head_dim", max(hidden // heads, 1))
    keys = number("num_key_value_heads", heads) * head_dim
    width = number("intermediate_size", 4 * hidden)
    if (experts := number("num_experts_per_tok", 0)) > 0:
        width = max(number("moe_intermediate_size", width) * experts, hidden)
    layer = 2 * (17 * hidden + 8 * heads * head_dim + 8 * keys + 6 * width)
    return number("num_hidden_layers", 32) * layer


def forecast(
    config: Mapping[str, Any],
    columns: HelperColumns,
    request: int,
    *,
    max_new_tokens: int,
    generation_tokens: int,
    ranks: int,
    measured_forwards: Sequence[Composition] = (),
    measured_passes: Collection[int] = (),
    backend: Backend = "dumper",
    every_forward: bool = False,
) -> Forecast:
    """The forecast, from the measured forwards of the request where they are known, else from the lengths.

    `every_forward`: those that do not hold the request are written too, as a server's own dumper does.
    """
    counted = _counted(measured_forwards, measured_passes, columns, request, generation_tokens)
    guessed = _guessed(columns, request, max_new_tokens, generation_tokens, every_forward)
    forwards, rows, own_rows = (None if every_forward else counted) or guessed
    layers = config.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) else 32
    tensors = layers * _FILES_PER_LAYER + _FILES_PER_FORWARD
    if backend == "digest":
        return Forecast(forwards, own_rows, _DIGEST_FILES * ranks, own_rows * tensors * _DIGEST_BYTES * ranks)
    if backend == "state":
        size_bytes = own_rows * layers * _STATE_ROW_BYTES * ranks
        return Forecast(forwards, own_rows, _DIGEST_FILES * ranks, size_bytes)
    files = forwards * tensors * ranks
    vocabulary = config.get("vocab_size")
    # Logits are written twice, for the rows that sample: about one a request and forward.
    logits = 8 * (vocabulary if isinstance(vocabulary, int) else 150_000) * columns.requests * forwards
    return Forecast(forwards, rows, files, (rows * row_bytes(config) + logits) * ranks + files * _FILE_BYTES)


def _counted(
    forwards: Sequence[Composition],
    passes: Collection[int],
    columns: HelperColumns,
    request: int,
    generation_tokens: int,
) -> tuple[int, int, int] | None:
    """Forwards, rows of their whole batches, rows of the request."""
    last = int(columns.prompt_len[request]) + generation_tokens - 2
    count = rows = own = 0
    for composition in forwards:
        for arm in ("warming", "generation", "scoring"):
            part = composition.part_of(passes, arm, request)
            if part is not None and (arm != "generation" or part.first_position <= last):
                count += 1
                rows += composition.rows
                own += part.rows
    return (count, rows, own) if count else None


def _guessed(
    columns: HelperColumns,
    request: int,
    max_new_tokens: int,
    generation_tokens: int,
    every_forward: bool,
) -> tuple[int, int, int]:
    prompts = int(columns.prompt_len.sum())
    prefills, scored = prompts, prompts + int(columns.output_len.sum())
    chunks = 4
    if every_forward:
        chunks += (prefills + scored) // _LARGEST_PREFILL
    else:
        prefills = min(prefills, _LARGEST_PREFILL)
        scored = min(scored, _LARGEST_PREFILL + int(columns.prompt_len[request]))
    extra = {"match": 0, "prefill_cache_hit": 1, "decode_cache_hit": max_new_tokens}[columns.helper]
    decodes = generation_tokens + extra
    own = 2 * int(columns.prompt_len[request]) + int(columns.output_len[request]) + decodes
    return decodes + chunks, prefills + scored + decodes * columns.requests, own
