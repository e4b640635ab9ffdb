"""Where a capture writes: a folder that nobody wrote into before, also beside what another one left."""

from pathlib import Path

from klbench.engine.capture import _new_folders


def test_a_capture_never_writes_among_the_dumps_or_the_trace_of_another(tmp_path: Path) -> None:
    first, trace = _new_folders(tmp_path / "traces")
    assert (first.name, trace.name) == ("dumps-1", "trace-1")
    (first / "rank0-000000001").mkdir()
    (tmp_path / "traces" / "trace-2").mkdir()
    again, other = _new_folders(tmp_path / "traces")
    assert (again.name, other.name) == ("dumps-3", "trace-3")
    assert list(again.iterdir()) == []
