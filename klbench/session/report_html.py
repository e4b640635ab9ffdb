"""A report as one self-contained HTML page: no script, nothing from elsewhere, plots as inline SVG.

Invariants: every text is escaped; the page's own policy forbids scripts, frames and any request.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from klbench.core.text import visible
from klbench.session.report_blocks import (
    Block,
    Bullets,
    Code,
    Fence,
    Figure,
    Fold,
    Heading,
    Inline,
    Paragraph,
    Span,
    Strong,
    Table,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f4f6; --line: #d0d7de;
  --mark: #b3261e; --calm: #2f6f4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171a; --soft: #1f2429;
  --line: #3a424a; --mark: #ff8a80; --calm: #7fd1a6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: var(--soft); }
code { padding: 0 .25em; overflow-wrap: anywhere; } pre { padding: .7rem; overflow-x: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left; vertical-align: top; }
th { background: var(--soft); } figure { margin: 1rem 0; } figcaption { font-size: 13px; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px ui-monospace, monospace; }
svg .axis { stroke: var(--line); } svg .mark { fill: var(--mark); } svg .calm { fill: var(--calm); }
svg .half { fill: var(--mark); opacity: .45; } svg .none { fill: var(--soft); }
svg .origin { fill: var(--mark); stroke: var(--ink); }
""".strip()
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html(blocks: Sequence[Block], *, title: str) -> str:
    """The whole page."""
    body = "\n".join(_block(part) for part in blocks)
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _text(value: str) -> str:
    return escape(visible(value))


def _span(span: Span) -> str:
    return "".join(map(_inline, span))


def _inline(part: Inline) -> str:
    match part:
        case Code(value):
            return f"<code>{_text(value)}</code>" if value else "–"
        case Strong(value):
            return f"<strong>{_text(value)}</strong>"
        case _:
            return _text(part)


def _block(part: Block) -> str:
    match part:
        case Heading(level, span):
            return f"<h{level}>{_span(span)}</h{level}>"
        case Paragraph(span):
            return f"<p>{_span(span)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_span(item)}</li>" for item in items) + "\n</ul>"
        case Table(names, rows):
            head = "".join(f"<th>{_text(name)}</th>" for name in names)
            lines = ["<tr>" + "".join(f"<td>{_span(cell)}</td>" for cell in row) + "</tr>" for row in rows]
            return (
                f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
                + "\n".join(lines)
                + "\n</tbody></table></div>"
            )
        case Fence(lines):
            return "<pre>" + "\n".join(map(_text, lines)) + "</pre>"
        case Figure(svg, caption):
            return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"
        case Fold(title, blocks, is_open):
            inner = "\n".join(map(_block, blocks))
            state = " open" if is_open else ""
            return f"<details{state}><summary>{_text(title)}</summary>\n{inner}\n</details>"
