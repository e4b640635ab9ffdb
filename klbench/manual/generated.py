"""The parts of the manual that the code says already, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from klbench.errors import ExitCode


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def path() -> str:
    """The steps of the guided path in full."""
    from klbench.core.guide_text import STEPS
    from klbench.tui.actions import key_now

    parts = []
    for number, step in enumerate(STEPS, 1):
        said = "\n\n".join((step.question, step.why, step.how))
        key = f"In the workbench: `{key_now(step.key)}`. " if step.key else ""
        parts.append(f"## {number}. {step.title}\n\n{said}\n\n{key}Without it: `{step.command}`.")
    return "\n\n".join(parts)


def experiments() -> str:
    """What each asks and what its outcomes mean."""
    from klbench.core.experiments import CATALOGUE

    parts = []
    for one in CATALOGUE.values():
        means = "\n".join(f"- {outcome.replace('_', ' ')}: {what}" for outcome, what in one.outcomes.items())
        starts = " The server is started again for it." if one.relaunches else ""
        parts.append(
            f"## `{one.name}`: {one.title}\n\n{one.question[:1].upper()}{one.question[1:]}{starts}\n\n{means}"
        )
    return "\n\n".join(parts)


def words() -> str:
    from klbench.core.guide_text import GLOSSARY

    return "\n".join(f"- *{word}*: {meaning}" for word, meaning in GLOSSARY.items())


def exit_codes() -> str:
    return table(("code", "meaning"), [(str(int(code)), code.in_full) for code in ExitCode])


def settings() -> str:
    """Every setting with its default and its variable, then the variables without a setting."""
    from klbench.settings import OTHER_VARIABLES, SETTINGS, in_file

    rows = [(f"`{one.key}`", f"`{one.variable}`", in_file(one.default), one.help) for one in SETTINGS]
    others = [(f"`{name}`", what) for name, what in OTHER_VARIABLES.items()]
    known = table(("setting", "variable", "default", "what it is"), rows)
    return f"{known}\n\n## Other variables\n\n{table(('variable', 'what it is'), others)}"


def keys() -> str:
    """Every action of the registry once, by its keys."""
    from klbench.tui.actions import ACTIONS, shown

    rows = [(" ".join(f"`{shown(key)}`" for key in one.keys), one.id, one.help) for one in ACTIONS]
    return table(("key", "action", "what it does"), rows)
