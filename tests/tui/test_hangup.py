"""A process whose terminal is gone ends, even where it waits for that terminal and hears no signal."""

import os
import pty
import subprocess
import sys

import pytest

from klbench.tui.hangup import ends_with_terminal

STUCK = """
import signal, sys, threading
from klbench.tui.hangup import ends_with_terminal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with ends_with_terminal(grace_s=0.2):
    print("up", flush=True)
    if sys.argv[1] == "stuck":
        threading.Event().wait()
    sys.stdin.readline()
print("left", flush=True)
"""


@pytest.fixture
def in_a_terminal():
    started = []

    def start(how):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK, how],
            stdin=slave,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(slave)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process, master

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_process_that_is_stuck_ends_with_its_terminal(in_a_terminal):
    process, master = in_a_terminal("stuck")
    os.close(master)
    assert process.wait(60) == 129


def test_a_process_that_goes_on_is_left_alone(in_a_terminal):
    process, master = in_a_terminal("goes on")
    os.write(master, b"\n")
    assert process.stdout.readline() == b"left\n"
    assert process.wait(60) == 0
    os.close(master)


def test_a_process_that_is_stuck_in_a_terminal_that_is_there_stays(in_a_terminal):
    process, master = in_a_terminal("stuck")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    os.close(master)


def test_a_terminal_that_is_gone_before_the_beginning_is_told():
    master, slave = pty.openpty()
    os.close(master)
    with pytest.raises(OSError, match="the terminal is gone"), ends_with_terminal(slave):
        pass
    os.close(slave)


def test_what_was_never_a_terminal_is_left_alone():
    reader, writer = os.pipe()
    os.close(writer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    closed = os.dup(nothing)
    os.close(closed)
    for source in (reader, nothing, closed):
        with ends_with_terminal(source):
            pass
    os.close(reader)
    os.close(nothing)
