"""The rules are parsed once, and again where the colours are others."""

from textual.css import stylesheet as textuals

from klbench.tui.stylesheet import OneParse


def test_rules_are_parsed_again_only_where_the_colours_are_others(monkeypatch):
    parsed, parse = [], textuals.parse

    def noted(scope, css, *rest, **named):
        parsed.append(css)
        return parse(scope, css, *rest, **named)

    monkeypatch.setattr(textuals, "parse", noted)
    sheet = OneParse(variables={"line": "#ff0000"})
    sources = [f".one-{number} {{ color: $line; }}" for number in range(100)]
    for source in sources:
        sheet.add_source(source)
    red = [rule.styles.color for rule in sheet.rules]
    assert parsed == sources
    sheet.set_variables({"line": "#ff0000"})
    sheet.add_source(".new { color: $line; }")
    sheet.reparse()
    assert len(sheet.rules) == 101
    assert parsed == [*sources, ".new { color: $line; }"]
    sheet.set_variables({"line": "#00ff00"})
    sheet.reparse()
    assert len(parsed) == 202
    assert not {colour.hex for colour in red} & {rule.styles.color.hex for rule in sheet.rules}
