"""Copying: the file is always there, the way is said, and what is sent decodes to what was copied."""

import base64
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.tui import clipboard


def test_without_tmux_the_terminal_is_asked_and_a_file_is_left(tmp_path):
    sent = []
    said = clipboard.copy("kl\t1e-3\n的", tmp_path, sent.append, {})
    assert (tmp_path / "clipboard.txt").read_text(encoding="utf-8") == "kl\t1e-3\n的"
    assert (tmp_path / "clipboard.txt").stat().st_mode & 0o077 == 0
    assert "OSC 52" in said
    assert str(tmp_path / "clipboard.txt") in said
    assert decoded(sent) == "kl\t1e-3\n的".encode()


def test_a_text_too_large_for_terminals_is_in_the_file_only_and_that_is_said(tmp_path):
    sent = []
    said = clipboard.copy("x" * 200_000, tmp_path, sent.append, {})
    assert sent == []
    assert "to the file only" in said
    assert (tmp_path / "clipboard.txt").stat().st_size == 200_000


def test_a_folder_that_cannot_be_written_is_said_and_the_terminal_is_still_asked(tmp_path):
    sent = []
    said = clipboard.copy("x", tmp_path / "gone", sent.append, {})
    assert "no file: No such file" in said
    assert decoded(sent) == b"x"


@given(st.binary(max_size=4000))
def test_inside_screen_every_string_is_short_and_together_they_are_the_sequence(content):
    parts = clipboard.osc52(content, inside_screen=True)
    assert all(len(part) <= 768 and part.startswith("\x1bP") and part.endswith("\x1b\\") for part in parts)
    assert "".join(part[2:-2] for part in parts) == clipboard.osc52(content, inside_screen=False)[0]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
def test_inside_tmux_its_buffer_holds_the_text(tmp_path, monkeypatch):
    socket = tmp_path / "tmux"
    tmux = ["tmux", "-S", str(socket)]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "cat"], check=True)
    try:
        monkeypatch.setenv("TMUX", f"{socket},0,0")
        monkeypatch.setattr(clipboard, "_TMUX_S", 60.0)
        sent = []
        said = clipboard.copy("curl 'a' | b\n", tmp_path, sent.append, {"TMUX": f"{socket},0,0"})
        assert "by tmux" in said
        assert sent == []
        shown = subprocess.run([*tmux, "show-buffer"], capture_output=True, check=True).stdout
        assert shown == b"curl 'a' | b\n"
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def test_where_tmux_does_not_answer_the_terminal_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sent = []
    assert "OSC 52" in clipboard.copy("x", tmp_path, sent.append, {"TMUX": "/nowhere,0,0"})
    assert decoded(sent) == b"x"


def decoded(sent: list[str]) -> bytes:
    found = re.fullmatch("\x1b\\]52;c;([A-Za-z0-9+/=]*)\x07", "".join(sent))
    assert found is not None
    return base64.b64decode(found[1])
