"""What the run says: conditions with their grade, the evidence, the next steps, and what was not compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from textual.containers import VerticalScroll
from textual.widget import Widget

from klbench.core.text import kl, visible, wrap
from klbench.session.state import HelperState
from klbench.tui import wording
from klbench.tui.actions import bindings
from klbench.tui.model import Model
from klbench.tui.screens.base import WorkScreen
from klbench.tui.widgets.text import Lines


class VerdictScreen(WorkScreen):
    """Plain text that scrolls."""

    place = "verdict"
    BINDINGS = bindings("verdict")
    AUTO_FOCUS = "#body"

    def content(self) -> Iterable[Widget]:
        yield Lines(id="title")
        yield VerticalScroll(Lines(id="text"), id="body")

    def draw(self) -> None:
        self.query_one("#title", Lines).show(wording.title(self.model.state, "", self.size.width))
        width = max(self.size.width - 4, 20)
        lines = [part for line in verdict_lines(self.model) for part in _wrapped(line, width)]
        self.query_one("#text", Lines).show("\n".join(lines))


def verdict_lines(model: Model) -> list[str]:
    """The whole verdict as lines."""
    run = model.run
    if run is None or run.verdict is None:
        return ["No run has ended yet, so there is no verdict."]
    verdict = run.verdict
    conditions = [wording.condition_words(str(name)) for name in verdict.get("conditions") or ()]
    lines = [
        f"VERDICT OF RUN {run.number} · {verdict.get('status', '?')} · grade {verdict.get('grade', '?')}",
        "",
        *(f"  looks like {name}" for name in conditions),
        *(["", "EVIDENCE"] if verdict.get("evidence") else []),
        *_items(verdict.get("evidence")),
        *(["", "NEXT"] if verdict.get("next") else []),
        *_items(verdict.get("next")),
        "",
        "WHAT WAS COMPARED",
    ]
    for helper in run.helpers:
        lines += _helper_lines(helper)
    prompts = run.prompts
    lines += [
        "",
        f"  {prompts.get('count', '?')} prompts, {prompts.get('source', '?')}, sha256 "
        f"{str(prompts.get('sha256', '?'))[:16]}",
    ]
    server = model.state.server
    if server.differs or server.notes:
        lines += ["", "THE SERVER"]
        lines += [f"  asked {d.get('asked', '?')}, in force {d.get('in_force', '?')}" for d in server.differs]
        lines += [f"  {note}" for note in server.notes]
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    """A line in as many as it needs, each under the words of the first."""
    blank = len(line) - len(line.lstrip(" ▸"))
    return wrap(visible(line), width, indent=" " * blank)


def _helper_lines(helper: HelperState) -> list[str]:
    result: Mapping[str, Any] = helper.result or {}
    if not result.get("tokens"):
        return [f"  {helper.helper}: {helper.status}, {result.get('reason') or 'nothing was compared'}"]
    past = result.get("fraction_past")
    words = [
        f"  {helper.helper}: {helper.status}, hits {result.get('hits')}/{result.get('requests')}, "
        f"{result.get('dropped', 0)} dropped",
        f"    {result['tokens']} tokens, {result.get('divergent_tokens')} differ, avg_kl_div "
        f"{kl(result.get('avg_kl_div'))}, max |Δ| {kl(result.get('max_abs_dlogprob'))}",
    ]
    if isinstance(past, Mapping) and past:
        some = [f"{float(share):.2%} past {nats}" for nats, share in past.items() if share]
        words.append("    " + (", ".join(some) if some else f"no token past {next(iter(past))}"))
    if result.get("reason"):
        words.append(f"    {result['reason']}")
    return words


def _items(items: object) -> list[str]:
    known = items if isinstance(items, list | tuple) else ()
    return [f"  ▸ {item.get('text', '')}" for item in known if isinstance(item, Mapping)]
