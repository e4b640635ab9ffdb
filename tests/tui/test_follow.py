"""Following a session: several events ride in one message, and silence stays silent."""

import recorded

from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.tui.follow import SessionFollower


def test_everything_since_the_last_look_rides_in_one_message(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    posted = []
    follower = SessionFollower(SessionFolder(recorder.folder), posted.append)
    follower.look()
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    follower.look()
    assert len(posted) == 2
    assert posted[1].state.run.number == 1
    assert posted[1].log_lines[-1].endswith("#new-token: 239")
    assert not posted[1].live


def test_nothing_is_posted_while_nothing_happens(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorded.launch(recorder)
    posted = []
    follower = SessionFollower(SessionFolder(recorder.folder), posted.append)
    for _ in range(40):
        follower.look()
    assert len(posted) == 1


def test_a_killed_runner_is_noticed_though_it_said_nothing(tmp_path):
    recorder = recorded.measuring(tmp_path / "s")
    posted = []
    SessionFollower(SessionFolder(recorder), posted.append).look()
    assert not posted[0].live
    assert posted[0].state.run.helpers[1].status == "stopped"


def test_a_relaunch_shows_the_new_log(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorded.launch(recorder)
    posted = []
    follower = SessionFollower(SessionFolder(recorder.folder), posted.append)
    follower.look()
    (recorder.folder / "server" / "second.log").write_text("hello again\n")
    recorder.add(ev.ServerStarting(command="x", log="server/second.log", ready_to_capture=True))
    follower.look()
    assert posted[-1].log_lines == ["hello again"]
    assert posted[-1].log_restarted
