"""What was edited in a checkout is named, file by file."""

import subprocess

import pytest

from klbench.engine.checkout import commits_between, files_between, read_checkout


def git(place, *arguments):
    command = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path):
    place = tmp_path / "checkout" / "python" / "sglang"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    (place / "norm.py").write_text("a = 1\n")
    git(tmp_path / "checkout", "init", "-q")
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "-q", "-m", "first")
    return place


async def test_a_clean_checkout_has_no_edited_files(package):
    found = await read_checkout(package)
    assert found.commit == git(package, "rev-parse", "HEAD")
    assert (found.subject, dict(found.changed)) == ("first", {})


async def test_two_edits_of_one_file_are_told_apart(package):
    hashes = []
    for content in ("a = 2\n", "a = 3\n"):
        (package / "norm.py").write_text(content)
        changed = (await read_checkout(package)).changed
        assert list(changed) == ["python/sglang/norm.py"]
        hashes.append(changed["python/sglang/norm.py"])
    assert hashes[0] != hashes[1]
    (package / "norm.py").unlink()
    assert (await read_checkout(package)).changed == {"python/sglang/norm.py": "gone"}


async def test_commits_and_files_between_two_commits_are_named(package):
    before = git(package, "rev-parse", "HEAD")
    (package / "norm.py").write_text("a = 2\n")
    git(package, "commit", "-q", "-a", "-m", "Fix the norm")
    root = (await read_checkout(package)).root
    after = git(package, "rev-parse", "HEAD")
    (commit,) = await commits_between(root, before, after)
    assert commit.endswith(" Fix the norm")
    assert await files_between(root, before, after) == ["python/sglang/norm.py"]
    assert await commits_between(root, "0" * 40, after) is None


async def test_a_commit_of_a_log_is_never_an_option_of_git(package):
    root, head = (await read_checkout(package)).root, git(package, "rev-parse", "HEAD")
    option = f"--output={package}/written"
    assert await files_between(root, option, head) is None
    assert await files_between(root, head, option) is None
    assert await commits_between(root, option, head) is None
    assert not list(package.glob("written*"))


async def test_what_a_repository_configures_is_not_run(package):
    before = git(package, "rev-parse", "HEAD")
    (package / "norm.py").write_text("a = 2\n")
    git(package, "commit", "-q", "-a", "-m", "Fix the norm")
    root, after = (await read_checkout(package)).root, git(package, "rev-parse", "HEAD")
    run = package.parent / "run"
    run.write_text(f"#!/bin/sh\ntouch {package}/ran\n")
    run.chmod(0o700)
    for name, value in (("core.fsmonitor", str(run)), ("diff.external", str(run)), ("gpg.program", str(run))):
        git(package, "config", name, value)
    git(package, "config", "log.showSignature", "true")
    assert await commits_between(root, before, after)
    assert await files_between(root, before, after) == ["python/sglang/norm.py"]
    await read_checkout(package)
    assert not (package / "ran").exists()


async def test_a_package_that_git_does_not_track_has_no_checkout(package):
    installed = package.parents[1] / ".venv" / "sglang"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert await read_checkout(installed) is None
    assert await read_checkout(package.parents[3]) is None
