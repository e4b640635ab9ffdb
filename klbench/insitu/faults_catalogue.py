"""The faults that klbench can plant, as data: what each does and what a right diagnosis of it must say.

Standard library only, so that klbench can list them without torch; `faults` plants them. A fault is written
`NAME` or `NAME:parameter=value,...`, for example `o_proj-rows:layer=2,rows=128`; several are joined by `+`,
and the name of a pair stands for its two.
"""

from typing import Dict, Optional, Sequence, Tuple

from .faults_entries import ARITHMETIC, ATTENTION, HEAD, PAIRS, STATE
from .faults_truth import ALL_HELPERS, ArmedFault, Fault, Pair, Truth

__all__ = [
    "ALL_HELPERS",
    "CATALOGUE",
    "PAIR_CATALOGUE",
    "ArmedFault",
    "Fault",
    "Pair",
    "Truth",
    "parse_fault",
    "parse_faults",
    "unfit",
]

# The three that a tour begins with come first.
_FIRST = ("o_proj-rows", "restore-key", "decode-window")

_BY_NAME = {fault.name: fault for fault in (*ARITHMETIC, *ATTENTION, *STATE, *HEAD)}
CATALOGUE: Dict[str, Fault] = {name: _BY_NAME[name] for name in dict.fromkeys((*_FIRST, *_BY_NAME))}

PAIR_CATALOGUE: Dict[str, Pair] = {pair.name: pair for pair in PAIRS}


LEAST: Dict[str, int] = {
    **dict.fromkeys(("layer", "residue", "spared", "after", "inside", "unhooked"), 0),
    "tile": 2,
    "pad": 2,
    "ranks": 3,
}
"""The least value of a parameter, 1 where nothing is said: below it a fault changes nothing."""

MOST: Dict[str, int] = {"unhooked": 1, "bits": 6, "ulps": 8192}
"""The largest value of a parameter: bfloat16 has 7 bits of mantissa, and 8192 ulps are a factor of 2**64."""


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
            allowed = ", ".join(parameters) or "none"
            raise ValueError(f"fault {name} has no parameter {key!r}; it has: {allowed}")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"parameter {key} of fault {name} is a whole number, not {value!r}")
        parameters[key] = int(value)
    _check_ranges(name, parameters)
    return ArmedFault(fault, parameters)


def _check_ranges(name: str, parameters: Dict[str, int]) -> None:
    for key, value in parameters.items():
        least, most = LEAST.get(key, 1), MOST.get(key)
        if key == "residue":
            most = parameters["modulus"] - 1
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"parameter {key} of fault {name} is {allowed}, not {value}")


def unfit(armed: ArmedFault, model: str, layers: Sequence[str]) -> Optional[str]:
    """Why this fault has no place in a model of the zoo; None where it has one.

    `layers` says for each layer of `model` what it is: "full_attention", "sliding_attention" or "conv".
    """
    fault = armed.fault
    if model not in fault.truth.models:
        return f"fault {fault.name} has no place in the {model} model; it has in: " + ", ".join(
            fault.truth.models
        )
    layer = armed.parameters.get("layer")
    if layer is None:
        return None
    if layer >= len(layers):
        return (
            f"fault {fault.name} cannot go into layer {layer}: the {model} model has layers 0 to "
            f"{len(layers) - 1}"
        )
    wanted = _layer_kinds(fault)
    if layers[layer] not in wanted:
        fitting = [str(number) for number, kind in enumerate(layers) if kind in wanted]
        return (
            f"fault {fault.name} cannot go into layer {layer} of the {model} model, whose kind is "
            f"{layers[layer]}; it fits layer {', '.join(fitting)}"
        )
    return None


def _layer_kinds(fault: Fault) -> Tuple[str, ...]:
    """The kinds of layers that have the fault's place."""
    if "window" in fault.truth.needs:
        return ("sliding_attention",)
    if ".conv." in fault.truth.module:
        return ("conv",)
    if ".self_attn." in fault.truth.module:
        return ("full_attention", "sliding_attention")
    return ("full_attention", "sliding_attention", "conv")


def parse_faults(text: str) -> Tuple[ArmedFault, ...]:
    """The faults that `text` spells, one or several. Raises ValueError that says what is allowed."""
    pair = PAIR_CATALOGUE.get(text.strip())
    return tuple(parse_fault(part) for part in (pair.faults if pair is not None else text.split("+")))
