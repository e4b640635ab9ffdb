"""The filter line: `kl>1e-3 pos:97 tok:"the" helper:prefill`, all terms of which a row must meet.

    term     [-] column op value, or a word that any text column must hold; - turns a term around
    op       : (equal; for text: holds), = != > >= < <=
    value    a number, a range 96..128, a word, or "words with \\" and \\\\ in quotes"; text ignores case

Evaluated over whole columns with numpy; nothing loops over rows where a column can be searched as a whole.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.tui.widgets.rows import Column, Rows, stable_order

Mask = npt.NDArray[np.bool_]

MOST_SHOWN_ROWS = 200_000
"""A text column that has no search of its own is formatted row by row: a second for so many."""

_TERM = re.compile(
    r"""(?P<minus>-)?(?:(?P<name>[\w\#Δ|+-]+)(?P<op>!=|>=|<=|[:=<>]))?(?P<value>"(?:\\.|[^"\\])*"?|[^\s"]*)"""
)
_COMPARE: dict[str, Callable[[Any, float], Any]] = {
    ":": operator.eq, "=": operator.eq, "!=": operator.ne,
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


class FilterError(ValueError):
    """Why a filter cannot be understood, in words for its user."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition. `name` is empty for a word that any text column may hold."""

    name: str
    op: str
    value: str
    negated: bool


def parse(text: str) -> tuple[Term, ...]:
    """The terms of a filter line, none for an empty one. Raises FilterError."""
    terms: list[Term] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _TERM.match(text, at)
        if found is None or found.end() == at:
            raise FilterError(f"cannot read {text[at:]!r}")
        at = found.end()
        name, value = found["name"] or "", _unquoted(found["value"])
        if name and not value:
            raise FilterError(f"what should {name} be? for example {name}{found['op']}1")
        if name or value:
            terms.append(Term(name, found["op"] or ":", value, bool(found["minus"])))
    return tuple(terms)


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    if len(value) < 2 or not value.endswith('"') or (value.endswith('\\"') and not value.endswith('\\\\"')):
        raise FilterError(f"the quote that begins {value[:12]!r} does not end")
    return re.sub(r"\\(.)", r"\1", value[1:-1])


def check(rows: Rows, terms: Sequence[Term]) -> None:
    """Raises FilterError where the terms do not fit the columns; looks at no row."""
    for term in terms:
        if not term.name:
            continue
        column = _column(rows, term.name)
        if _is_text(column):
            if term.op not in (":", "=", "!="):
                raise FilterError(f"{term.name} is text: {term.name}:word, not {term.op}")
            if column.search is None and rows.count > MOST_SHOWN_ROWS:
                raise FilterError(f"{column.key} cannot be searched in {rows.count:,} rows")
        else:
            _bounds(term)


def rows_that_pass(rows: Rows, terms: Sequence[Term]) -> Mask:
    """[count] which rows meet every term; the terms were checked for these rows."""
    passing = np.ones(rows.count, np.bool_)
    for term in terms:
        met = _met(rows, term)
        passing &= ~met if term.negated else met
    return passing


def _met(rows: Rows, term: Term) -> Mask:
    if not term.name:
        texts = [column for column in rows.columns if _is_text(column)]
        met = np.zeros(rows.count, np.bool_)
        for column in texts:
            met |= _holds(rows, column, term.value)
        return met
    column = _column(rows, term.name)
    if _is_text(column):
        met = _holds(rows, column, term.value)
        return ~met if term.op == "!=" else met
    return _compared(column, term)


def _column(rows: Rows, name: str) -> Column:
    """The column of that name: its key, its title or another name of it."""
    wanted = name.lower()
    known: dict[str, Column] = {}
    for column in rows.columns:
        for word in (column.key, column.title, *column.names):
            known.setdefault(word.lower(), column)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise FilterError(f"no column {name}: {hint}There are {', '.join(column.key for column in rows.columns)}")


def _holds(rows: Rows, column: Column, text: str) -> Mask:
    if column.search is not None:
        return column.search(text)
    if rows.count > MOST_SHOWN_ROWS:
        return np.zeros(rows.count, np.bool_)
    wanted = text.lower()
    return np.fromiter(
        (wanted in column.show(row).lower() for row in range(rows.count)), np.bool_, rows.count
    )


def _is_text(column: Column) -> bool:
    return column.search is not None or column.values is None


def _compared(column: Column, term: Term) -> Mask:
    assert column.values is not None
    values = column.compared if column.compared is not None else column.values
    low, high = _bounds(term)
    with np.errstate(invalid="ignore"):
        if high is not None:
            met = (values >= low) & (values <= high)
        elif math.isnan(low):
            met = np.isnan(values.astype(np.float64))
        else:
            met = _COMPARE[term.op](values, low)
    return np.asarray(met, np.bool_)


def _bounds(term: Term) -> tuple[float, float | None]:
    """The number of a term, or the two of its range. Raises FilterError."""
    low, dots, high = term.value.partition("..")
    if not dots:
        return _number(term, low), None
    if term.op not in (":", "="):
        raise FilterError(f"a range goes with a colon: {term.name}:{term.value}")
    return _number(term, low), _number(term, high)


def _number(term: Term, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FilterError(f"{text!r} is no number: {term.name} is compared with one") from None


def search_by_value(ids: npt.NDArray[Any], text_of: Callable[[int], str]) -> Callable[[str], Mask]:
    """A search over a column whose text depends on a number (a token's id): each number is asked once."""

    def search(text: str) -> Mask:
        wanted = text.lower()
        values, places = np.unique(ids, return_inverse=True)
        found = np.fromiter((wanted in text_of(int(v)).lower() for v in values), np.bool_, len(values))
        return found[places]

    return search


def arranged(
    rows: Rows,
    given: npt.NDArray[np.int64] | None,
    column: Column | None,
    descends: bool,
    terms: Sequence[Term],
) -> npt.NDArray[np.int64]:
    """Row numbers in the order in which they are shown: filtered, then sorted; needs no widget."""
    order = np.arange(rows.count, dtype=np.int64) if given is None else given
    if terms:
        order = order[rows_that_pass(rows, terms)[order]]
    if column is not None and column.values is not None:
        order = order[stable_order(column.values[order], descends=descends)]
    return order
