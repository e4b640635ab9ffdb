"""The answer to one row of the GPU list: right, wrong or undecided, with what speaks against it.

wrong("match is clean") + undecided("its grade is unknown")     # wrong; RIGHT adds nothing
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Documents = Mapping[str, Any]
"""What the row's commands wrote, by the name of the JSON file."""


@dataclass(frozen=True)
class Judgement:
    """What speaks against a row's answer, and what it does not settle; a sentence each."""

    wrong: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    def __add__(self, other: "Judgement") -> "Judgement":
        return Judgement(self.wrong + other.wrong, self.undecided + other.undecided)

    @property
    def answer(self) -> str:
        return "wrong" if self.wrong else "undecided" if self.undecided else "right"


RIGHT = Judgement()


def in_words(result: Mapping[str, Any]) -> str:
    """What a row said, then what of it is wrong and what is left open; of an object of `rows.json`."""
    parts = [result["said"]]
    parts += [f"NOT {sentence}" for sentence in result["wrong"]]
    parts += [f"OPEN {sentence}" for sentence in result.get("undecided", ())]
    return "; ".join(filter(None, parts))


def wrong(*sentences: str) -> Judgement:
    return Judgement(wrong=sentences)


def undecided(*sentences: str) -> Judgement:
    return Judgement(undecided=sentences)


def together(judgements: Iterable[Judgement]) -> Judgement:
    return sum(judgements, RIGHT)
