"""The faults that klbench can plant, as data: what each does and what a right diagnosis of it must say.

Standard library only, so that klbench can list them without torch; `faults` plants them. A fault is written
`NAME` or `NAME:parameter=value,...`, for example `o_proj-rows:layer=2,rows=128`; several are joined by `+`,
and the name of a pair stands for its two.
"""

from typing import Dict, Tuple

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
]

# The three that a tour begins with come first.
_FIRST = ("o_proj-rows", "restore-key", "decode-window")

_BY_NAME = {fault.name: fault for fault in (*ARITHMETIC, *ATTENTION, *STATE, *HEAD)}
CATALOGUE: Dict[str, Fault] = {name: _BY_NAME[name] for name in dict.fromkeys((*_FIRST, *_BY_NAME))}

PAIR_CATALOGUE: Dict[str, Pair] = {pair.name: pair for pair in PAIRS}


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
    return ArmedFault(fault, parameters)


def parse_faults(text: str) -> Tuple[ArmedFault, ...]:
    """The faults that `text` spells, one or several. Raises ValueError that says what is allowed."""
    pair = PAIR_CATALOGUE.get(text.strip())
    return tuple(parse_fault(part) for part in (pair.faults if pair is not None else text.split("+")))
