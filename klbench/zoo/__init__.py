"""Tiny random-weight models and seeded prompts, made on first use without torch or a network.

A model here has a real architecture, a real tokenizer and meaningless weights: enough for every code path
that makes prefill and decode disagree, small enough for two CPU cores.

    >>> folder = make_model("dense", zoo_root())
    >>> prompts = seeded_prompts(32, 300, seed=1, vocab=plain_token_ids())
"""

from klbench.zoo.architectures import CONTEXT_LENGTH, KINDS, SLIDING_WINDOW, Kind, layer_kinds
from klbench.zoo.models import make_model, zoo_root
from klbench.zoo.prompts import prompt_lengths, prompts_sha256, seeded_prompts
from klbench.zoo.tokenizer import plain_token_ids

__all__ = [
    "CONTEXT_LENGTH",
    "KINDS",
    "SLIDING_WINDOW",
    "Kind",
    "layer_kinds",
    "make_model",
    "plain_token_ids",
    "prompt_lengths",
    "prompts_sha256",
    "seeded_prompts",
    "zoo_root",
]
