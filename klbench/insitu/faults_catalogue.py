"""The faults that klbench can plant, as data: what each does and what a right diagnosis of it must say.

Standard library only, so that klbench can list them without torch; `faults` plants them. A fault is written
`NAME` or `NAME:parameter=value,...`, for example `o_proj-rows:layer=2,rows=128`.
"""

from dataclasses import dataclass, field
from typing import Dict, Mapping, Tuple


@dataclass(frozen=True)
class Truth:
    """What is really wrong, to judge a diagnosis by.

    `module` has `{layer}` for the parameter of that name; `kinds` are the origin kinds that name the fault
    rightly; `dirty_helpers` are those that diverge on a model of the zoo with the usual prompts.
    """

    condition: str
    module: str
    kinds: Tuple[str, ...]
    dirty_helpers: Tuple[str, ...]
    phase: str


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue; `parameters` are whole numbers with their defaults."""

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
        return self.fault.name + ":" + ",".join(f"{name}={value}" for name, value in self.parameters.items())

    @property
    def module(self) -> str:
        """The path of the faulty module, without what stands before the layers."""
        return self.fault.truth.module.format(**self.parameters)


ALL_HELPERS = ("match", "prefill_cache_hit", "decode_cache_hit")

CATALOGUE: Dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="o_proj-rows",
            explanation=(
                "When `rows` or more rows share the call, one layer's o_proj adds two rounded half sums,",
                "as a split-K kernel does: prefill rounds differently from decode, on every row alike.",
            ),
            parameters={"layer": 1, "rows": 64},
            truth=Truth(
                condition="batch_invariance",
                module="model.layers.{layer}.self_attn.o_proj",
                kinds=("operator",),
                dirty_helpers=ALL_HELPERS,
                phase="extend",
            ),
        ),
        Fault(
            name="restore-key",
            explanation=(
                "A request that begins on a restored prefix finds one key row of one layer overwritten by",
                "its neighbour's, `back` rows before the prefix ends; cold requests are untouched.",
            ),
            parameters={"layer": 1, "back": 4},
            truth=Truth(
                condition="different_function",
                module="model.layers.{layer}.self_attn.attn",
                kinds=("state_restore",),
                dirty_helpers=("prefill_cache_hit", "decode_cache_hit"),
                phase="extend",
            ),
        ),
        Fault(
            name="decode-window",
            explanation=(
                "After `after` decode steps of a request, one layer's attention misses the key `back` rows",
                "before its own: only decode is wrong, and only from the middle of the output on.",
            ),
            parameters={"layer": 2, "after": 16, "back": 3},
            truth=Truth(
                condition="different_function",
                module="model.layers.{layer}.self_attn.attn",
                kinds=("operator",),
                dirty_helpers=ALL_HELPERS,
                phase="decode",
            ),
        ),
    )
}


def parse_fault(text: str) -> ArmedFault:
    """The fault that `text` spells, with defaults filled in. Raises ValueError that says what is allowed."""
    name, _, rest = text.strip().partition(":")
    fault = CATALOGUE.get(name)
    if fault is None:
        raise ValueError(f"no fault {name!r}; there are: {', '.join(CATALOGUE)}")
    parameters = dict(fault.parameters)
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in parameters:
            raise ValueError(f"fault {name} has no parameter {key!r}; it has: {', '.join(parameters)}")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"parameter {key} of fault {name} is a whole number, not {value!r}")
        parameters[key] = int(value)
    return ArmedFault(fault, parameters)
