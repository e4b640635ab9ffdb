"""What is wrong with a request before its server is up: said at once, and not after a launch of ten minutes.

Only what is certain is refused. A server that is attached to says its context itself, and one that is
launched may read it in a way that is not known here; both are checked again when the server answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from klbench.core.columns import HELPERS
from klbench.engine.facts import parse_arguments, read_model_config
from klbench.engine.prompts import check_fits, read_prompt_file
from klbench.session.request import Options, StartRequest, Target
from klbench.zoo import CONTEXT_LENGTH, prompt_lengths

# Where sglang looks before max_position_embeddings, or by what it multiplies it.
_OTHER_LENGTHS = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "rope_scaling", "rope_parameters",
    "text_config",
)  # fmt: skip


def check_beforehand(start: StartRequest) -> None:
    """Raises UsageError for prompts that cannot be read, or that cannot fit into the model's context."""
    lengths = known_lengths(start.options)
    chosen = tuple(name for name in HELPERS if name in start.options.helpers) or HELPERS
    check_fits(lengths, chosen, start.options.max_new_tokens, known_context_length(start.target))


def known_lengths(options: Options) -> Iterable[int]:
    """Tokens of each prompt; 1 where that is not known before a tokenizer is at hand."""
    match options.prompts:
        case None:
            return map(int, prompt_lengths(options.samples, options.prompt_tokens, options.seed))
        case "longbench":
            return [1]
        case file:
            entries = read_prompt_file(Path(file), options.samples)
            return [1 if isinstance(entry, str) else len(entry) for entry in entries]


def known_context_length(target: Target) -> int | None:
    """Tokens that the server will take, None where only the server knows."""
    given = parse_arguments(target.arguments)
    if target.kind == "url" or "--config" in given:
        return None
    if (length := given.get("--context-length")) is not None:
        return int(length) if length.isdecimal() else None
    if target.kind == "demo":
        return CONTEXT_LENGTH
    config = read_model_config(target.model_path) or {}
    longest = config.get("max_position_embeddings")
    known = isinstance(longest, int) and not any(config.get(name) for name in _OTHER_LENGTHS)
    return longest if known else None
