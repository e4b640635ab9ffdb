"""The manual: every topic is there, says nothing that the code denies, and is plain where it should be."""

import os
import pty
import re
import subprocess
import sys

import click
import pytest

from klbench import manual
from klbench.cli import main
from klbench.cli.commands import klbench
from klbench.core.guide import EVERYWHERE, GLOSSARY, STEPS
from klbench.core.text import cell_width
from klbench.engine.versions import NEWEST, OLDEST
from klbench.errors import ExitCode, UsageError
from klbench.manual.render import render
from klbench.session.folder import make_session, new_session_path
from klbench.settings import SETTINGS
from klbench.tui.actions import ACTIONS, BY_ID, shown
from klbench.tui.filtering import parse
from tests.tools.exit_codes import exit_code_table
from tests.tools.readme import README, replaced

NAMES = [topic.name for topic in manual.TOPICS]
SESSIONS = ("SESSION", "[SESSION]", "[SESSION|BUNDLE]", "BEFORE", "AFTER")
FIXED_WORDS = (
    "server", "helper", "run", "arm", "request", "position", "offset", "divergence", "operator", "trace",
    "origin", "finding", "fault", "runner", "session",
)  # fmt: skip
"""One word for each thing, in code, screens and documents."""


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KLBENCH_CONFIG", str(tmp_path / "config.toml"))


def text_of(name: str) -> str:
    return manual.markdown(manual.BY_NAME[name])


def commands_in(text: str) -> list[str]:
    """What the text has in backticks that begins with klbench and a word."""
    return re.findall(r"`(klbench [^`]+)`", text)


def resolved(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the words behind it."""
    command: click.Command = klbench
    while words and isinstance(command, click.Group) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def known_command_line(line: str) -> None:
    """Fails where the line has a command or an option that klbench has not."""
    command, words = resolved(line.split(" -- ")[0].split()[1:])
    assert command is not klbench or not words or words[0].isupper() or words[0].startswith("-"), line
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for option in (word for word in words if word.startswith("--")):
        assert option in known | {"--help"}, line


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def commands_of(group: click.Group = klbench, path: str = "klbench") -> dict[str, click.Command]:
    """Every command that is no secret, by what one types."""
    found: dict[str, click.Command] = {path: group}
    for name, command in group.commands.items():
        if not command.hidden:
            place = f"{path} {name}"
            found |= commands_of(command, place) if isinstance(command, click.Group) else {place: command}
    return found


COMMANDS = commands_of()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_of_a_topic_exists(name):
    for line in commands_in(text_of(name)):
        known_command_line(line)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_topic_is_that_of_the_registry(name):
    raw = (manual.resources.files("klbench.manual") / f"{name}.md").read_text(encoding="utf-8")
    for action in re.findall(r"\{key ([^}]*)\}", raw):
        assert action in BY_ID
    assert "{key" not in text_of(name)


def test_a_topic_has_the_key_that_its_action_has():
    assert f"`{shown(BY_ID['locate'].keys[0])}` on a divergent request" in text_of("capture")


def test_what_is_generated_is_whole():
    assert all(step.title in text_of("path") and step.command in text_of("path") for step in STEPS)
    assert all(f"*{word}*" in text_of("words") for word in GLOSSARY)
    assert all(setting.key in text_of("configuration") for setting in SETTINGS)
    assert all(setting.variable in text_of("configuration") for setting in SETTINGS)
    assert all(f"| {int(code)} | {code.in_full} |" in text_of("exit-codes") for code in ExitCode)
    assert all(action.help.replace("|", "\\|") in text_of("keys") for action in ACTIONS)


def test_the_readme_lists_the_exit_codes_of_the_enumeration():
    text = README.read_text(encoding="utf-8")
    assert replaced(text, "exit-codes", exit_code_table()) == text, "uv run python -m tests.tools.exit_codes"
    assert [line.split()[1] for line in exit_code_table() if line.startswith("| ")][1:] == [
        str(int(code)) for code in ExitCode
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_option_has_a_sentence(name):
    assert COMMANDS[name].help
    assert [param.name for param in options_of(COMMANDS[name]) if not param.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_whatever_takes_a_session_completes_it(name):
    known = make_session(new_session_path("demo-dense"), {"kind": "demo", "model": "dense"}, {}).name
    context = click.Context(COMMANDS[name])
    for param in COMMANDS[name].params:
        if param.make_metavar(context).strip(".") in SESSIONS:
            assert [item.value for item in param.shell_complete(context, known[:4])] == [known], param.name


def test_the_exit_code_of_a_difference_names_every_command_that_gives_it():
    for name, command in COMMANDS.items():
        if re.search(r"xit code 1\b|, 1 a ", command.help or ""):
            word = name.removeprefix("klbench ")
            assert word == "run" or f"`{word}`" in ExitCode.DIVERGED.in_full, name


@pytest.mark.parametrize("name", [name for name in klbench.commands if not klbench.commands[name].hidden])
def test_the_readme_names_every_command(name):
    assert re.search(rf"klbench {name}\b", README.read_text(encoding="utf-8"))


def test_the_readme_names_the_versions_of_sglang_that_klbench_knows():
    text = README.read_text(encoding="utf-8")
    assert f"sglang must be {OLDEST} or later (klbench was used with up to {NEWEST})" in text


def test_the_readme_names_commands_and_options_that_exist():
    text = README.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    lines = [*commands_in(text), *re.findall(r"^(?:uv run )?(klbench [^#&\n]+)", blocks, re.MULTILINE)]
    assert len(lines) > 40
    for line in lines:
        known_command_line(line)


def test_the_words_that_are_fixed_are_explained():
    assert set(FIXED_WORDS) <= set(GLOSSARY)
    assert set(EVERYWHERE) < set(GLOSSARY)


def test_what_an_experiment_asks_keeps_its_spelling():
    assert "\n\nDoes the replay of CUDA graphs have a part in it? The server is started" in text_of(
        "experiments"
    )


def test_the_filter_examples_are_terms_of_the_language():
    terms = re.findall(r"^\| `([^`]+)` \|", text_of("filter"), re.MULTILINE)
    assert len(terms) == 8
    for term in terms:
        (parsed,) = parse(term)
        assert parsed.value


def test_the_help_of_the_command_line_has_every_exit_code(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out.partition("Exit codes:")[2]
    for code in ExitCode:
        assert re.search(rf"\b{int(code)} +{code.meaning}(  |\n|$)", told), code
    assert all(len(line) <= 80 for line in told.splitlines())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 72, 100])
def test_no_line_is_wider_than_the_terminal(name, width):
    lines = render(text_of(name), width)
    assert all(cell_width(line.text) <= width for line in lines)
    assert lines[0].heading


def test_nothing_of_a_text_is_lost_by_its_wrapping():
    def bare(text: str) -> str:
        return re.sub(r"[\s|#-]+", "", text.replace("\\|", ""))

    for name in NAMES:
        if "| " not in text_of(name):
            shown_text = "".join(line.text for line in render(text_of(name), 72))
            assert bare(shown_text) == bare(text_of(name)), name


@pytest.mark.parametrize(
    ("asked", "name"),
    [("grades", "conditions"), ("Exit Codes", "exit-codes"), ("exit_codes", "exit-codes"), ("tmux", "ssh")],
)
def test_a_topic_is_found_by_what_people_call_it(asked, name):
    assert manual.find(asked).name == name


def test_an_unknown_topic_is_refused_with_the_nearest(capsys):
    assert main(["help", "filtr"]) == 2
    error = capsys.readouterr().err
    assert "did you mean filter?" in error
    assert "exit-codes" in error
    with pytest.raises(UsageError, match=r"there is no topic 'zebra'$"):
        manual.find("zebra")


def test_words_for_topics_do_not_name_two():
    words = [word for topic in manual.TOPICS for word in (topic.name, *topic.words)]
    assert len(words) == len(set(words))


def test_the_list_names_every_topic(capsys):
    assert main(["help"]) == 0
    told = capsys.readouterr().out
    for topic in manual.TOPICS:
        assert re.search(rf"^{topic.name} +{re.escape(manual.title(topic))}$", told, re.MULTILINE)


def test_a_command_that_is_no_topic_shows_its_options(capsys):
    assert main(["help", "run"]) == 0
    assert "--threshold" in capsys.readouterr().out
    assert main(["help", "sessions"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Sessions: leaving")
    assert "klbench sessions --help" in told


def test_a_topic_of_two_words_needs_no_quotes_and_a_command_no_small_letters(capsys):
    assert main(["help", "exit", "codes"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert main(["help", "RUN"]) == 0
    assert "--max-new-tokens" in capsys.readouterr().out


def test_help_works_where_the_configuration_does_not(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[workbench]\nthem = 1\n")
    assert main(["help", "configuration"]) == 0
    assert "workbench.theme" in capsys.readouterr().out


def test_a_pipe_gets_plain_text_and_a_terminal_bold_headings():
    command = [sys.executable, "-m", "klbench", "help", "filter"]
    piped = subprocess.run(command, capture_output=True, check=True).stdout
    assert b"\x1b" not in piped
    assert piped.startswith(b"The filter line\n")
    master, slave = pty.openpty()
    shown_there = subprocess.Popen(command, stdout=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    told = b""
    while b"cursor stays there" not in told:
        told += os.read(master, 65536)
    os.close(master)
    assert shown_there.wait() == 0
    assert told.startswith(b"\x1b[1mThe filter line\x1b[0m")
