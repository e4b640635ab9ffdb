"""Other keys by the configuration: checked strictly, at work on the screens, and named by every text."""

import json
import re

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, workbench

from klbench import manual, settings
from klbench.cli import main
from klbench.errors import UsageError
from klbench.tui import actions, keymap
from klbench.tui.actions import ACTIONS, BY_ID, Situation
from klbench.tui.screens.help import help_lines


@pytest.fixture(autouse=True)
def _own_keys_again():
    yield
    actions.rebind({})


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Writes the configuration file."""
    monkeypatch.setenv("KLBENCH_CONFIG", str(tmp_path / "config.toml"))
    return lambda text: (tmp_path / "config.toml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('lokate = "L"', "keys.lokate: there is no such action; did you mean locate?"),
        ('locate = "v"', "keys: v would be both locate and verdict on the screen 'main'"),
        ('locate = "s"', "keys: s would be both locate and sort_next on the screen 'main'"),
        ('locate = "ö"', "only characters of ASCII"),
        ('locate = "ctrl+shift+l"', "no terminal sends it"),
        ('locate = "ctrl+i"', "a terminal sends another key's bytes"),
        ('locate = "ctrl+q"', "it leaves the workbench"),
        ('locate = ""', "it is empty"),
        ("locate = []", "it takes a key or a list of keys"),
        ("locate = 1", "it takes a key or a list of keys"),
        ('map_up = "j"', "keys: j would be both map_up and map_down on the screen 'origin'"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_the_reason(configured, capsys, table, said):
    configured(f"[keys]\n{table}\n")
    for command in (["config", "check"], ["config", "show"], ["sessions"]):
        assert main(command) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_no_key_of_the_registry_is_refused_and_none_conflicts():
    for action in ACTIONS:
        for key in action.default_keys:
            typed = actions.shown(key)
            assert keymap.named_key(typed if len(typed) == 1 and typed.isascii() else key) == key
    assert keymap.conflicts({}) == []
    assert keymap.conflicts({action.id: action.default_keys for action in ACTIONS}) == []


def test_two_actions_may_change_places():
    assert keymap.checked({"locate": ("O",), "origin": ("o",)}) == {"locate": ("O",), "origin": ("o",)}


@pytest.mark.parametrize(
    ("text", "name"), [("?", "question_mark"), ("@", "at"), ("-", "minus"), ("F5", "f5")]
)
def test_a_key_is_written_as_it_is_typed(text, name):
    assert keymap.named_key(text) == name


def test_config_show_and_the_manual_have_the_keys(configured, capsys):
    configured('[keys]\nlocate = ["K", "f5"]\n')
    assert main(["config", "show"]) == 0
    assert re.search(r"keys\.locate +K f5 +\S*config\.toml", capsys.readouterr().out)
    assert main(["config", "show", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"]["locate"]["keys"] == ["K", "f5"]
    assert main(["help", "capture"]) == 0
    assert "`K` on a divergent request" in capsys.readouterr().out
    assert main(["guide", "locate"]) == 0
    assert "in the workbench: K ·" in capsys.readouterr().out
    configured("[keys]\nlocate = 1\n")
    actions.rebind({})
    assert main(["help", "capture"]) == 0
    assert "`o` on a divergent request" in capsys.readouterr().out


async def test_the_new_key_works_the_old_one_does_not_and_all_texts_name_it(configured, finished):
    configured('[keys]\norigin = "K"\nlocate = "f5"\nverdict = [",", "v"]\n')
    found = keymap.load()
    async with workbench(finished, settings=found, size=(120, 40)) as (app, pilot):
        text = screen_text(app)
        assert "press f5" in text
        assert " f5 locate" in text
        assert " , verdict" in text
        assert "press o" not in text
        await press(pilot, "o")
        assert app.screen.place == "main"
        await press(pilot, "K")
        assert app.screen.place == "origin"
        await press(pilot, "escape", "comma")
        assert app.screen.place == "verdict"
        await press(pilot, "escape", "v")
        assert app.screen.place == "verdict"
        assert "f5" in "\n".join(help_lines("main", Situation(), "capture the layers"))
        assert "f5" in await press(pilot, "escape", "ctrl+p", *"locate")


async def test_keys_of_tables_change_too_and_swapped_keys_are_swapped(configured, finished):
    configured('[keys]\ndown = "Z"\nlocate = "O"\norigin = "o"\n')
    async with workbench(finished, settings=keymap.load()) as (app, pilot):
        table = app.screen.query_one("#requests-table")
        before = table.cursor
        await press(pilot, "Z", "Z")
        assert table.cursor == before + 2
        await press(pilot, "j")
        assert table.cursor == before + 2
        await press(pilot, "o")
        assert app.screen.place == "origin"


async def test_no_text_of_the_screens_names_a_key_that_has_become_another(configured, measuring, finished):
    """Every letter that is pressed alone becomes one behind ctrl; no sentence may name the old ones."""
    letters = [a for a in ACTIONS if len(a.default_keys[0]) == 1 and a.default_keys[0].isalpha()]
    moved = {"log": "f2", "cancel": "f3", "guide_all": "f4", "locate": "f5", "report": "f6", "run": "f7",
             "control": "f8", "experiments": "f9", "guide": "f10", "make_plan": "f11"}  # fmt: skip
    assert set(moved) <= {action.id for action in letters}
    configured("[keys]\n" + "".join(f'{name} = "{key}"\n' for name, key in moved.items()))
    found = keymap.load()
    old = "".join(BY_ID[name].default_keys[0] for name in moved)
    names = re.compile(
        rf"(?:press|·|;|,) ([{old}])(?: (?:cancels|shows|explains|makes|takes|begins|writes)|$|\s*│|\s*\n)"
    )
    for session in (measuring, finished):
        async with (
            scripted_runner(session),
            workbench(session, settings=found, readonly=False) as (app, pilot),
        ):
            for keys in ([], ["f9"], ["escape", "v"], ["escape", "O"], ["escape", "f2"]):
                text = await press(pilot, *keys)
                assert not names.search(text), text
            app.model.touring = True
            for keys in (["escape"], ["O"], ["escape", "enter"]):
                text = await press(pilot, *keys)
                assert not names.search(text), text


def test_a_session_is_not_needed_to_refuse_a_key_before_the_screen_opens(configured, tmp_path, capsys):
    session = recorded.finished(tmp_path / "20251129-dense")
    configured('[keys]\nlocate = "v"\n')
    assert main(["open", str(session)]) == 2
    assert "would be both locate and verdict" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is not understood"):
        keymap.load()


def test_the_examples_of_the_manual_and_of_the_file_are_understood(configured):
    told = re.findall(r"`(\w+ = [^`]+)`", manual.markdown(manual.BY_NAME["keys"]).split("| key |")[0])
    assert len(told) == 2
    shown = [line[2:] for line in settings.example().partition("[keys]")[2].splitlines() if " = " in line]
    for examples in (told, shown):
        configured("\n".join(["[keys]", *examples]))
        assert len(keymap.checked(keymap.load().bound)) == 2
