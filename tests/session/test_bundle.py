"""A bundle is a session that travels; one from a stranger can do nothing but be read or refused."""

import io
import os
import re
import stat
import struct
import zipfile

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from klbench.cli import main
from klbench.cli.headless import Plan, execute
from klbench.errors import ExitCode, KlbenchError, UsageError
from klbench.session import bundle as bundles
from klbench.session.bundle import find_session_or_bundle, is_unpacked, open_bundle, write_bundle
from klbench.session.columns import load_columns, without_prompts
from klbench.session.folder import SessionFolder
from klbench.session.log import read_log
from klbench.session.reading import read_state
from klbench.session.redaction import Redactor
from klbench.session.report import write_report
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START

pytestmark = pytest.mark.usefixtures("places")


@pytest.fixture
def session(tmp_path):
    path = tmp_path / "20261129-demo"
    execute(START, Plan("run"), session=path, json_place=None, make_work=FakeBench)
    folder = SessionFolder(path)
    log = folder.server / "server-1" / "server.log"
    log.parent.mkdir()
    log.write_text("ready on gpu-box-7\nReceive: obj=GenerateReqInput(text='a secret prompt')\n")
    write_report(folder, read_state(folder))
    export = folder.exports / "origin-1"
    export.mkdir(parents=True)
    (export / "show.py").write_text("# made on gpu-box-7\n")
    (export / "origin.json").write_text('{"trace": "/data/alice/trace"}')
    (export / "tensors.safetensors").write_bytes(b"/data/alice")
    return folder


def bundled(session, tmp_path, redactor=None):
    return write_bundle(session, tmp_path / "one.klbench.zip", redactor)


def test_a_bundle_opens_as_the_session_that_it_was_made_of(session, tmp_path):
    folder = open_bundle(bundled(session, tmp_path))
    assert read_state(folder).run.verdict == read_state(session).run.verdict
    for helper in ("match", "decode_cache_hit"):
        one, two = (load_columns(place.runs / f"1-{helper}.npz") for place in (session, folder))
        assert one.prompt_ids.tolist() == two.prompt_ids.tolist()
    assert (folder.server / "server-1" / "server.log").read_text().startswith("ready")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert open_bundle(tmp_path / "one.klbench.zip").path == folder.path


def test_the_commands_take_a_bundle_for_a_session(session, tmp_path, capsys):
    file = str(bundled(session, tmp_path))
    assert main(["open", file]) == 0
    assert "diverged" in capsys.readouterr().out
    assert main(["compare", str(session.path), file]) == 0
    assert main(["open", "--continue", file]) == ExitCode.USAGE


def test_what_was_unpacked_starts_no_server_of_a_strangers_choice(session, tmp_path, capsys):
    by_us = open_bundle(bundled(session, tmp_path))
    by_hand = tmp_path / "by-hand"
    with zipfile.ZipFile(tmp_path / "one.klbench.zip") as archive:
        archive.extractall(by_hand)
    for folder in (by_us.path, by_us.path.parent / ".." / "bundles" / by_us.name, by_hand):
        assert main(["open", "--continue", str(folder)]) == ExitCode.USAGE
        assert main(["run", "--session", str(folder)]) == ExitCode.USAGE
        assert capsys.readouterr().err.count("a bundle can only be read") == 2
    assert not is_unpacked(session)


def test_report_makes_the_bundle(session, tmp_path, capsys):
    file = tmp_path / "out.klbench.zip"
    assert main(["report", str(session.path), "--bundle", "--redact", "--output", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert find_session_or_bundle(str(file)).exists()


def test_a_redacted_bundle_holds_no_prompt_no_name_and_no_path(session, tmp_path):
    redactor = Redactor(frozenset({"gpu-box-7"}))
    write_report(session, read_state(session), ["html"], redactor=redactor)
    file = bundled(session, tmp_path, redactor)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name, content in parts.items():
        if not name.endswith(".npz"):
            assert b"gpu-box-7" not in content, name
            assert b"secret prompt" not in content, name
            assert str(session.path.parent).encode() not in content, name
    assert not [name for name in parts if "prompts-" in name or "texts" in name]
    assert parts["exports/origin-1/show.py"] == b"# made on <name>\n"
    assert parts["exports/origin-1/origin.json"] == b'{"trace":"<path>/trace"}'
    assert parts["exports/origin-1/tensors.safetensors"] == b"/data/alice"
    assert [name for name in parts if name.startswith("reports/")] != []
    folder = open_bundle(file)
    columns, whole = (load_columns(place.runs / "1-match.npz") for place in (folder, session))
    assert columns.prompt_ids.size == 0
    assert set(columns.token_id.tolist()) == {-1}
    assert np.array_equal(columns.prefill_nats, whole.prefill_nats)
    assert read_state(folder).run.verdict["status"] == "found"
    kinds = [[type(entry.event) for entry in read_log(place.events)] for place in (session, folder)]
    assert kinds[0] == kinds[1]
    assert folder.events.read_bytes() != session.events.read_bytes()


def archive_of(tmp_path, entries, manifest=True):
    """An archive with these (name or ZipInfo, content) entries beside what every bundle has."""
    file = tmp_path / "strange.klbench.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        if manifest:
            note = bundles.Manifest(schema=bundles.SCHEMA, klbench_version="0.1", made_at=0.0, session="s")
            archive.writestr("bundle.json", msgspec.json.encode(note))
            archive.writestr("session.json", b"{}")
        for name, content in entries:
            archive.writestr(name, content)
    return file


def link(name, target):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info, target


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "runs/../../evil", "/etc/evil", "runs\\..\\evil", "C:/evil", "runs/.hidden", "lock",
        "server/server.log", "exports/a/b/c/d/e", "traces/x", "runs/" + "a" * 300, "runs/a\nb",
    ],
)  # fmt: skip
def test_a_name_that_has_no_place_in_a_bundle_refuses_all_of_it(tmp_path, name):
    before = sorted(tmp_path.rglob("*"))
    file = archive_of(tmp_path, [(name, b"x")])
    with pytest.raises(UsageError, match="no klbench bundle"):
        open_bundle(file)
    left = {path for path in tmp_path.rglob("*") if path.is_file()} - set(before)
    assert left == {file}


def test_a_link_is_refused_and_not_followed(tmp_path):
    file = archive_of(tmp_path, [link("runs/link", "/etc/passwd")])
    with pytest.raises(UsageError) as refused:
        open_bundle(file)
    assert "is a link" in refused.value.why


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        file = archive_of(tmp_path, [("runs/a", b"1"), ("runs/a", b"2")])
    with pytest.raises(UsageError) as refused:
        open_bundle(file)
    assert "twice" in refused.value.why


def test_too_many_entries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_ENTRIES", 3)
    with pytest.raises(UsageError) as refused:
        open_bundle(archive_of(tmp_path, [("runs/a", b"1"), ("runs/b", b"2")]))
    assert "more than 3 entries" in refused.value.why


@pytest.mark.parametrize("lies", [False, True])
def test_what_unpacks_to_too_much_is_refused_whatever_its_header_says(tmp_path, monkeypatch, lies):
    file = archive_of(tmp_path, [("runs/a", b"\0" * 500_000)])
    if lies:
        content = bytearray(file.read_bytes())
        for at in range(len(content) - 4):
            if content[at : at + 4] == struct.pack("<I", 500_000):
                content[at : at + 4] = struct.pack("<I", 10)
        file.write_bytes(bytes(content))
    monkeypatch.setattr(bundles, "MAX_BYTES", 100_000)
    with pytest.raises(UsageError, match="no klbench bundle"):
        open_bundle(file)
    assert not list((tmp_path / "home" / "bundles").iterdir())


def test_a_bundle_of_a_newer_klbench_says_so(tmp_path):
    note = bundles.Manifest(schema="klbench.bundle/9", klbench_version="9.1", made_at=0.0, session="s")
    parts = [("bundle.json", msgspec.json.encode(note)), ("session.json", b"{}")]
    with pytest.raises(UsageError, match=r"klbench\.bundle/9") as refused:
        open_bundle(archive_of(tmp_path, parts, manifest=False))
    assert "9.1" in refused.value.why


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive", b"\0" * 100])
def test_what_is_no_archive_is_refused(tmp_path, content):
    file = tmp_path / "x.klbench.zip"
    file.write_bytes(content)
    with pytest.raises(UsageError):
        open_bundle(file)


@given(place=st.floats(0, 1, exclude_max=True), cut=st.booleans(), flip=st.integers(1, 255))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_damaged_bundle_opens_as_a_session_or_is_refused(session, tmp_path, place, cut, flip):
    content = bytearray(bundled(session, tmp_path).read_bytes())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= flip
    file = tmp_path / "damaged.klbench.zip"
    file.write_bytes(bytes(content))
    try:
        folder = open_bundle(file)
    except UsageError:
        return
    assert folder.path.parent == tmp_path / "home" / "bundles"


def test_only_regular_files_of_the_session_travel(session, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    os.symlink(outside, session.runs / "linked.npz")
    with zipfile.ZipFile(bundled(session, tmp_path)) as archive:
        assert "runs/linked.npz" not in archive.namelist()
    assert without_prompts(io.BytesIO(b"no npz").getvalue()) is None


def test_columns_that_unpack_to_too_much_are_left_out_of_a_redacted_bundle(session, monkeypatch):
    content = next(session.runs.glob("*-match.npz")).read_bytes()
    assert without_prompts(content) is not None
    monkeypatch.setattr("klbench.session.columns.MAX_FILE_BYTES", 100)
    assert without_prompts(content) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [(b'"requests_detail":[', b'"requests_detail":7,"x":['), (b'"hits":3', b'"hits":"{}"')],
)
def test_a_bundle_with_facts_of_another_shape_is_read_or_refused_in_words(
    session, tmp_path, capsys, field, value
):
    content = session.events.read_bytes()
    assert field in content
    # A stranger may leave the checksums out.
    session.events.write_bytes(re.sub(rb',"crc":\d+', b"", content.replace(field, value)))
    file = str(bundled(session, tmp_path))
    capsys.readouterr()
    for command in (["open", file], ["report", file], ["compare", file, file]):
        assert main(command) in (ExitCode.CONSISTENT, ExitCode.USAGE, ExitCode.UNDECIDED)
        assert "defect" not in capsys.readouterr().err


def test_an_opened_bundle_is_found_again_by_the_name_that_the_workbench_shows(session, tmp_path):
    opened = open_bundle(bundled(session, tmp_path))
    assert find_session_or_bundle(opened.name).path == opened.path
    with pytest.raises(UsageError, match="no session"):
        find_session_or_bundle("../bundles")


def test_a_bundle_that_nobody_could_open_is_not_written(session, tmp_path):
    with open(session.exports / "origin-1" / "weights.safetensors", "wb") as file:
        file.truncate(bundles.MAX_BYTES + 1)
    with pytest.raises(KlbenchError, match="too large to be opened") as refused:
        bundled(session, tmp_path)
    assert "exports/origin-1/weights.safetensors" in refused.value.why
    assert not (tmp_path / "one.klbench.zip").exists()
