"""What a fault is, and what is true of it: data to judge a diagnosis by. Standard library only."""

from dataclasses import dataclass, field
from typing import Mapping, Tuple

ALL_HELPERS = ("match", "prefill_cache_hit", "decode_cache_hit")
HITS = ("prefill_cache_hit", "decode_cache_hit")
ALL_MODELS = ("dense", "moe", "swa", "hybrid")
ATTENTION_MODELS = ("dense", "moe", "swa")
"""Those of attention layers alone, whose modules have the same names."""

NEEDS = {
    "hits": "requests that begin on a restored prefix",
    "others": "another request in the batch",
    "chunks": "prompts that are cut into chunks (--chunked-prefill-size)",
    "window": "rows past a sliding window",
    "padding": "decode batches that are no multiple of `pad` rows",
    "retraction": "a request that is retracted and computed again (SGLANG_TEST_RETRACT=1)",
}
"""What a run must have beside the model for a fault to fire at all; without it the fault did not fire."""

FIRST_POSITIONS = {
    "rows": "the first row whose two forwards lie on different sides of `rows` rows",
    "scored": "the first row that scores a generated token: the last of the prompt",
    "decode": "the first decode row",
    "after": "the decode row behind `after` decode steps",
    "step": "the row of decode step `step`",
    "interval": "the first decode row at a multiple of `interval`",
    "cached": "the first row computed behind the restored prefix",
    "split": "the first row whose keys are split elsewhere, or in one arm only",
    "divergent": "the first row whose token has two logprobs: nothing before the logprob differs",
    "tile": "the first row that only one arm computed in an extend of a row count in the odd half of `tile`",
    "padded": "the first row that was filled up with padding in one arm only",
    "chunk": "the first row of a later chunk that begins in one arm only",
    "resumed": "`back` rows before the last one that is computed again after a retraction",
    "any": "no rule: it depends on the values or on chance",
}
"""The rules for the first row position of an origin, by name."""


@dataclass(frozen=True)
class Truth:
    """What is really wrong.

    `module` has `{layer}` for the parameter of that name; `kinds` are the origin kinds that name the fault
    rightly; `dirty_helpers` are those that diverge on a model of the zoo with the usual prompts, all others
    stay at exactly zero; `first` is a key of FIRST_POSITIONS; `requests` and `fires` say in words which
    requests are touched and when the fault can fire at all; `needs` are keys of NEEDS.
    """

    condition: str
    module: str
    kinds: Tuple[str, ...]
    dirty_helpers: Tuple[str, ...]
    phase: str
    first: str = "any"
    requests: str = "all"
    fires: str = ""
    models: Tuple[str, ...] = ATTENTION_MODELS
    needs: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue; `parameters` are whole numbers with their defaults.

    With `unhooked=1` a fault that has this parameter acts only while no hook watches its module.
    """

    name: str
    explanation: Tuple[str, str]
    parameters: Mapping[str, int]
    truth: Truth


@dataclass(frozen=True)
class ArmedFault:
    """A fault with all its parameters."""

    fault: Fault
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def spelled(self) -> str:
        """The text that parses to this."""
        values = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.fault.name}:{values}" if values else self.fault.name

    @property
    def module(self) -> str:
        """The path of the faulty module, without what stands before the layers; for a gap `A -> B`."""
        return self.fault.truth.module.format(**self.parameters)


@dataclass(frozen=True)
class Pair:
    """Two faults at once. `masked`: the second lies in the causal cone of the first and never sees equal
    inputs; otherwise neither does, and both must be reported."""

    name: str
    explanation: Tuple[str, str]
    faults: Tuple[str, str]
    masked: bool
    models: Tuple[str, ...] = ATTENTION_MODELS
