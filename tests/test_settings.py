"""Settings: later wins, every value knows where it comes from, what is not understood is named."""

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from klbench import settings
from klbench.cli.commands import klbench
from klbench.errors import UsageError


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KLBENCH_CONFIG", str(tmp_path / "config.toml"))


def load(tmp_path, text="", **environment):
    file = tmp_path / "config.toml"
    file.write_text(text)
    return settings.load(environment, file)


def test_the_later_source_wins_and_says_so(tmp_path):
    key = "workbench.theme"
    assert (load(tmp_path)[key], load(tmp_path).of(key).origin) == ("dark", "default")
    settings.remember("theme", "light")
    assert (load(tmp_path)[key], load(tmp_path).of(key).origin) == ("light", "remembered")
    text = '[workbench]\ntheme = "dark"\n'
    assert load(tmp_path, text).of(key).origin == str(tmp_path / "config.toml")
    both = load(tmp_path, text, KLBENCH_THEME="light")
    assert (both[key], both.of(key).origin) == ("light", "KLBENCH_THEME")
    flagged = both.with_flags({key: "dark"})
    assert (flagged[key], flagged.of(key).origin) == ("dark", "--theme")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\nsampels = 3\n", "run.sampels: there is no such key; did you mean run.samples?"),
        ("[workbnch]\ntheme = 'dark'\n", "did you mean workbench.theme?"),
        ("theme = 'dark'\n", "did you mean workbench.theme?"),
        ("[workbench]\ntheme = 'drak'\n", "one of dark, light; did you mean dark?"),
        ("[workbench]\nmouse = 3\n", "true or false"),
        ("[run]\nsamples = 0\n", "a whole number from 1 on"),
        ("[run]\nsamples = 2.5\n", "a whole number"),
        ("[run]\nsamples = true\n", "a whole number"),
        ("[run]\nthreshold = nan\n", "a number from 0 on"),
        ("[run]\nserver_python = ''\n", "not empty"),
        ("[run\n", "config.toml"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, text, says):
    with pytest.raises(UsageError) as error:
        load(tmp_path, text)
    assert says in error.value.what
    assert "klbench config example" in error.value.next


def test_every_mistake_is_named_at_once(tmp_path):
    with pytest.raises(UsageError) as error:
        load(tmp_path, "[run]\nsampels = 3\nseeds = 1\n", KLBENCH_MOUSE="perhaps")
    assert "and 2 more" in error.value.what
    assert "KLBENCH_MOUSE is 'perhaps'" in error.value.why


def test_a_variable_that_is_nearly_ours_is_a_mistake_and_others_are_not(tmp_path):
    with pytest.raises(UsageError, match="did you mean KLBENCH_SAMPLES"):
        load(tmp_path, KLBENCH_SAMPELS="3")
    load(tmp_path, KLBENCH_NONCE="abc", KLBENCH_SOMETHING_ELSE="1", HOME="/root")


def test_the_example_is_understood_and_sets_nothing(tmp_path):
    found = load(tmp_path, settings.example())
    assert all(found.of(key).origin == "default" for key in found)
    lines = [line.removeprefix("# ") for line in settings.example().splitlines()]
    uncommented = load(
        tmp_path,
        "\n".join(line for line in lines if line.startswith("[") or (" = " in line and '""' not in line)),
    )
    assert all(uncommented[key] == found[key] for key in found)


@given(st.binary(max_size=200))
def test_any_remembered_file_is_harmless(content):
    settings.remember("theme", "light")
    settings._remembered_file().write_bytes(content)
    assert isinstance(settings.remembered(), dict)
    assert settings.load({}, settings.paths.home() / "none.toml")["workbench.theme"] in ("dark", "light")


def test_settings_are_defaults_of_runs_and_the_command_line_wins(tmp_path, monkeypatch):
    from klbench.cli import headless

    (tmp_path / "config.toml").write_text("[run]\nsamples = 7\nserver_python = '/opt/py'\n")
    monkeypatch.setenv("KLBENCH_SEED", "5")
    seen = []
    monkeypatch.setattr(headless, "execute", lambda start, *_args, **_more: seen.append(start.options) or 0)
    runner = CliRunner()
    assert runner.invoke(klbench, ["run", "--demo"], standalone_mode=False).exception is None
    assert (
        runner.invoke(klbench, ["run", "--demo", "--samples", "9"], standalone_mode=False).exception is None
    )
    assert [(o.samples, o.seed, o.server_python) for o in seen] == [(7, 5, "/opt/py"), (9, 5, "/opt/py")]


def test_show_names_the_origin_of_each_value(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("[run]\nsamples = 7\n")
    monkeypatch.setenv("KLBENCH_THEME", "light")
    shown = CliRunner().invoke(klbench, ["config", "show"]).output
    lines = {line.split()[0]: line.split()[1:3] for line in shown.splitlines() if "." in line.split()[0]}
    assert lines["run.samples"] == ["7", str(tmp_path / "config.toml")]
    assert lines["workbench.theme"] == ["light", "KLBENCH_THEME"]
    assert lines["run.seed"] == ["1", "default"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_calls_klbench(shell):
    script = CliRunner().invoke(klbench, ["completion", shell]).output
    assert "_KLBENCH_COMPLETE" in script
    assert "klbench" in script


def test_completing_names_commands_options_and_sessions(tmp_path, monkeypatch, capfd):
    from klbench.cli import main

    session = tmp_path / "home" / "sessions" / "20261129-dense"
    session.mkdir(parents=True)
    (session / "events.jsonl").touch()
    monkeypatch.setenv("_KLBENCH_COMPLETE", "bash_complete")

    def complete(*words):
        monkeypatch.setenv("COMP_WORDS", " ".join(("klbench", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        assert main([]) == 0
        return [line.partition(",")[2] for line in capfd.readouterr().out.splitlines()]

    assert "sessions" in complete("sess")
    assert "--max-new-tokens" in complete("run", "--max")
    assert complete("report", "2026") == ["20261129-dense"]
    assert "md" in complete("report", "--format", "")
