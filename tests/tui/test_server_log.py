"""The server's log: lines appear once, whole and safe, whatever happens to the file."""

from klbench.tui.server_log import FIRST_BYTES, ServerLog, clean_line, speaks_of_trouble


def test_lines_appear_when_they_are_whole(tmp_path):
    file = tmp_path / "server.log"
    log = ServerLog(file)
    assert log.read() == ([], False)
    file.write_text("one\ntw")
    assert log.read() == (["one"], False)
    with open(file, "a") as out:
        out.write("o\nthree\n")
    assert log.read() == (["two", "three"], False)
    assert log.read() == ([], False)


def test_a_replaced_log_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "server.log"
    file.write_text("old line one\nold line two\n")
    log = ServerLog(file)
    log.read()
    file.unlink()
    file.write_text("new\n")
    assert log.read() == (["new"], True)


def test_of_a_large_log_the_end_is_read(tmp_path):
    file = tmp_path / "server.log"
    file.write_text("x" * 100 + "\n" + "\n".join(f"line {i}" for i in range(400_000)) + "\n")
    lines, _ = ServerLog(file).read()
    assert lines[-1] == "line 399999"
    assert 0 < sum(len(line) + 1 for line in lines) <= FIRST_BYTES


def test_colours_go_and_everything_else_shows():
    assert clean_line("\x1b[32mok\x1b[0m\tdone") == "ok    done"
    assert clean_line("\x1b]0;owned\x07") == "␛]0;owned␇"
    assert clean_line("10%\r50%\r100%\r") == "100%"
    assert len(clean_line("y" * 1_000_000)) < 5000


def test_trouble_is_found_by_word():
    assert speaks_of_trouble("RuntimeError: no")
    assert speaks_of_trouble("Traceback (most recent call last):")
    assert speaks_of_trouble("CUDA out of memory")
    assert not speaks_of_trouble("terror errors=0 throughput 3")
