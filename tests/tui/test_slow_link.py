"""When a line counts as slow, and where nothing is known of it."""

import pytest

from klbench.tui import slow_link

SSH = {"SSH_CONNECTION": "1 2 3 4"}


@pytest.mark.parametrize(
    ("took_s", "environment", "said"),
    [
        (0.2, SSH, "this line takes 200 ms there and back"),
        (0.15, SSH, "this line takes 150 ms there and back"),
        (0.149, SSH, ""),
        (None, SSH, ""),
        (0.2, {}, ""),
        (0.2, {**SSH, "TMUX": "/tmp/tmux,1,0"}, ""),
        (0.2, {**SSH, "STY": "1.pts-0"}, ""),
    ],
)
def test_what_helps_is_said_where_the_line_is_known_to_be_slow(monkeypatch, took_s, environment, said):
    monkeypatch.setattr(slow_link, "round_trip_s", lambda _source, _target: took_s)
    advice = slow_link.advice(environment)
    assert advice.startswith(said)
    assert bool(advice) is bool(said)
