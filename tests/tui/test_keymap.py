"""Other keys by the configuration: checked strictly, at work on the screens, and named by every text."""

import json
import re

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, workbench
from ways import KINDS, at_work, go

from klbench import manual, settings
from klbench.cli import main
from klbench.errors import UsageError
from klbench.session import events as ev
from klbench.tui import actions, keymap
from klbench.tui.actions import ACTIONS, Situation
from klbench.tui.screens.base import WorkScreen
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


OTHERS = [chr(code) for code in (*range(0x10D0, 0x10F1), *range(0x561, 0x587), *range(0x430, 0x450))]
"""Letters that no keyboard has together, one for each action."""
WORDS = "atMV"
"""Keys that are words of their own on the screens."""
LETTERS = "".join(
    {key for a in ACTIONS for key in a.default_keys if len(key) == 1 and key.isalpha()} - {*WORDS}
)
LONE = re.compile(
    rf"(?<!\d )(?<![\w\[\].,:+/'-])[{LETTERS}](?![\w\[\].:/'-])|\b(?:[Ee]nter|[Ss]pace|esc|tab)\b"
)
"""What a sentence names a key by."""
MARKS = ("100% v",)
"""What stands beside a chart."""


@pytest.fixture
def all_keys_moved(monkeypatch):
    """Every text names other keys; what is pressed is as it was."""
    assert len(OTHERS) > len(ACTIONS)
    moved = {action.id: (key,) for action, key in zip(ACTIONS, OTHERS, strict=False)}
    monkeypatch.setattr("klbench.tui.app.checked", lambda _bound: moved)
    monkeypatch.setattr(actions, "rebound", dict)


def lone_keys(text: str) -> list[str]:
    """The lines that name a key of old."""
    return [line for line in text.splitlines() if LONE.search(line) and not any(m in line for m in MARKS)]


@pytest.mark.usefixtures("all_keys_moved")
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, WorkScreen)])
async def test_no_text_of_a_screen_names_a_key_that_has_become_another(name, tmp_path):
    settings.remember("toured", True)
    found = settings.load()
    if name == "StartScreen":
        async with workbench(None, settings=found, size=(120, 40)) as (app, _pilot):
            assert lone_keys(screen_text(app)) == []
        return
    async with at_work(tmp_path, (120, 40), settings=found) as (app, pilot, _told):
        await go(app, pilot, name)
        for touring in (False, True):
            app.model.touring = touring
            app.show_all()
            await settle(pilot)
            assert lone_keys(screen_text(app)) == []


@pytest.mark.usefixtures("all_keys_moved")
@pytest.mark.parametrize("name", ["measuring", "unmeasured", "failed"])
async def test_no_text_of_an_unfinished_session_names_a_key_that_has_become_another(name, tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    if name == "failed":
        recorder.add(ev.ServerEnded(expected=False, exit_code=1, why="it ended", last_lines=["so it is"]))
    if name == "measuring":
        recorded.begin_run(recorder)
    async with (
        scripted_runner(path),
        workbench(path, settings=settings.load(), size=(120, 40), readonly=False) as (app, pilot),
    ):
        for keys in ([], ["X"], ["v"], ["M"], ["W"], ["l"], ["at"], ["O"]):
            assert lone_keys(await press(pilot, *keys)) == []
            while len(app.screen_stack) > 2:
                app.pop_screen()


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
