"""How much a capture with the stock dumper writes, before it is started.

Counted on a Qwen3 layer: 17 tensors of hidden width, 8 of the width of all query heads, 8 of all key heads,
6 of the MLP's width; two bytes an element, about 1.5 KB around each file. Other architectures are near it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klbench.core.columns import HelperColumns
from klbench.engine.compositions import Composition

_FILES_PER_LAYER = 42
_FILES_PER_FORWARD = 20
_FILE_BYTES = 1500
_LARGEST_PREFILL = 16384


@dataclass(frozen=True, slots=True)
class Forecast:
    """`rows` are rows of whole batches, summed over the captured forwards."""

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
) -> Forecast:
    """The forecast, from the measured forwards of the request where they are known, else from the lengths."""
    counted = _counted(measured_forwards, measured_passes, columns, request, generation_tokens)
    forwards, rows = counted or _guessed(columns, request, max_new_tokens, generation_tokens)
    layers = config.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) else 32
    files = forwards * (layers * _FILES_PER_LAYER + _FILES_PER_FORWARD) * ranks
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
) -> tuple[int, int] | None:
    last = int(columns.prompt_len[request]) + generation_tokens - 2
    count = rows = 0
    for composition in forwards:
        for arm in ("warming", "generation", "scoring"):
            part = composition.part_of(passes, arm, request)
            if part is not None and (arm != "generation" or part.first_position <= last):
                count += 1
                rows += composition.rows
    return (count, rows) if count else None


def _guessed(
    columns: HelperColumns, request: int, max_new_tokens: int, generation_tokens: int
) -> tuple[int, int]:
    prompts = int(columns.prompt_len.sum())
    scored = min(prompts + int(columns.output_len.sum()), _LARGEST_PREFILL + int(columns.prompt_len[request]))
    if columns.helper == "match":
        prefills, extra = min(prompts, _LARGEST_PREFILL), 0
    elif columns.helper == "prefill_cache_hit":
        prefills, extra = min(prompts, _LARGEST_PREFILL), 1
    else:
        prefills, extra = min(prompts, _LARGEST_PREFILL), max_new_tokens
    decodes = generation_tokens + extra
    return decodes + 4, prefills + scored + decodes * columns.requests
