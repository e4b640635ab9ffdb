"""What a command imports before it works, and what the long version says of the machine."""

import json
import subprocess
import sys

import pytest

from klbench.cli import main
from tests.cli.test_commands import recorded_session


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


HEAVY = (
    "textual",
    "rich",
    "torch",
    "sglang",
    "transformers",
    "httpx",
    "numpy",
    "msgspec",
    "platformdirs",
    "psutil",
    "asyncio",
)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["run", "--help"], ["run"], ["help"], ["help", "keys"]]
)
def test_asking_for_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from klbench.cli import main\n"
        f"main({arguments!r})\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = told.stdout.splitlines()[-1]
    # A command reads the settings, whose place platformdirs tells; `run` itself then checks its target.
    allowed = {"platformdirs"} if arguments[-1] in ("run", "keys") or "run" in arguments else set()
    allowed |= {"msgspec"} if arguments == ["run"] else set()
    assert set(json.loads(loaded.replace("'", '"'))) <= allowed


@pytest.mark.parametrize("command", ["sessions", "open"])
def test_looking_at_sessions_imports_neither_arrays_nor_what_talks_to_servers(command):
    folder = recorded_session()
    arguments = [command, folder.name] if command == "open" else [command]
    program = (
        "import sys\n"
        "from klbench.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        "print([m for m in ('textual', 'httpx', 'numpy', 'asyncio') if m in sys.modules])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["runner", "link", "state", "detached", "report", "bench"])
def test_the_session_layer_imports_no_screen_and_no_engine_of_sglangs(module):
    program = (
        # httpx itself imports rich where it is installed, for a command line of its own.
        f"import sys, klbench.session.{module}\n"
        "print([m for m in ('textual', 'torch', 'sglang', 'transformers') if m in sys.modules])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_the_long_version_names_what_a_report_of_a_defect_should(capsys, monkeypatch, tmp_path):
    import numpy
    import textual

    monkeypatch.setenv("TERM", "screen-256color")
    monkeypatch.setenv("TMUX", "/tmp/tmux")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert main(["--version", "-vv"]) == 0
    found = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert sys.executable in found["python"]
    assert (found["textual"], found["numpy"]) == (textual.__version__, numpy.__version__)
    assert found["terminal"].startswith("screen-256color · ")
    assert "tmux" in found["terminal"]
    assert "LC_ALL=C.UTF-8" in found["locale"]
    assert found["sessions"] == str(tmp_path / "home" / "sessions")
    assert {"klbench", "sglang", "httpx", "configuration", "models", "system"} <= set(found)


def test_no_sglang_is_said_in_the_long_version(capsys, monkeypatch):
    from klbench.engine import server_python

    monkeypatch.setattr(server_python, "_candidates", lambda _environment: [])
    assert main(["-v", "--version"]) == 0
    assert "no Python with sglang was found" in capsys.readouterr().out


def test_verbose_without_version_is_refused(capsys):
    assert main(["-v"]) == 2
    assert "-v goes with --version" in capsys.readouterr().err
