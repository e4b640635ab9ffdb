"""Standard streams that are closed, full or left by their reader: said in one line, never a defect, and never
an answer that looks like one."""

import subprocess
import sys

import pytest

from klbench.errors import ExitCode

pytestmark = pytest.mark.faults

COMMANDS = ("sessions", "sessions --json -", "--help", "--version", "guide", "run --help")


def klbench(arguments, redirection, tmp_path):
    """The exit code and what came out on stderr of `klbench ARGUMENTS REDIRECTION` in a shell."""
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m klbench {arguments} {redirection}'],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "KLBENCH_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)},
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_full_stdout_is_said(tmp_path, arguments):
    code, _, told = klbench(arguments, ">/dev/full", tmp_path)
    assert code == ExitCode.UNDECIDED
    assert told.startswith("klbench: cannot write ")
    assert "No space left on device" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").rglob("crash-*"))


@pytest.mark.parametrize("arguments", [*COMMANDS, "run --demo", "locate --demo"])
def test_a_closed_stdout_is_refused_before_the_work(tmp_path, arguments):
    code, _, told = klbench(arguments, ">&-", tmp_path)
    assert (code, told.count("\n")) == (ExitCode.USAGE, 1)
    assert told.startswith("klbench: standard output is closed")
    assert not (tmp_path / "home" / "sessions").exists()


def test_a_closed_stdin_or_stderr_changes_nothing(tmp_path):
    assert klbench("sessions", "<&-", tmp_path)[:2] == (0, "no sessions yet · klbench demo makes one\n")
    assert klbench("sessions", "2>&-", tmp_path)[:2] == (0, "no sessions yet · klbench demo makes one\n")
    # What is an error stays off stdout, where a program reads.
    code, shown, _ = klbench("open nothing-here", "2>&-", tmp_path)
    assert (code, shown) == (ExitCode.USAGE, "")


def test_a_reader_that_leaves_is_no_divergence(tmp_path):
    code, _, told = klbench("doctor", "| true; exit 0", tmp_path)
    assert code == 0
    assert "Traceback" not in told
