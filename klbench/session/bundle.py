"""A session in one archive, for a colleague who has neither the server nor sglang.

    <session>.klbench.zip
        bundle.json                      schema, klbench version, session, redacted or not
        session.json events.jsonl        the session
        runs/ reports/ exports/          measurements, reports, exported operators
        server/server-1/server.log       the ends of the server's logs

Reading trusts nothing: only these names, no links, no path that leaves the target, bounded in entries and in
bytes; what was unpacked is read like any session, which trusts its files no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

import klbench
from klbench import paths
from klbench.core.text import size
from klbench.errors import KlbenchError, UsageError
from klbench.session.folder import SessionFolder, find_session
from klbench.session.log import encode_line
from klbench.session.redaction import Redactor
from klbench.storage import open_regular, read_small

SCHEMA = "klbench.bundle/1"
ENDING = ".klbench.zip"
MAX_ENTRIES = 4096
MAX_BYTES = 2 * 1024**3
"""Unpacked, all together."""
MAX_ARCHIVE_BYTES = 2 * 1024**3
LOG_TAIL_BYTES = 8 * 1024**2

_BLOCK = 1 << 20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}"
_ALLOWED = re.compile(
    rf"bundle\.json|session\.json|events\.jsonl|(?:runs|reports)/{_NAME}"
    rf"|server/{_NAME}/server\.log|exports/(?:{_NAME}/){{0,3}}{_NAME}"
)
_UNPACKED = re.compile(r"[0-9a-f]{24}")
# Lines in which a server repeats what was sent to it.
_PROMPT_LINE = re.compile(r"input_ids|GenerateReqInput|TokenizedGenerate|prompt=")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """bundle.json."""

    schema: str
    klbench_version: str
    made_at: float
    session: str
    redacted: bool = False


def is_bundle(path: Path) -> bool:
    return path.is_file() and path.name.endswith(".zip")


def find_session_or_bundle(name: str) -> SessionFolder:
    """The session of that name, or the one that the bundle of that name holds. Raises UsageError.

    A bundle that was opened before is also found by the name of its folder, which the workbench shows.
    """
    path = Path(name).expanduser()
    if is_bundle(path):
        return open_bundle(path)
    unpacked = SessionFolder(_place() / name)
    return unpacked if _UNPACKED.fullmatch(name) and unpacked.exists() else find_session(name)


@contextlib.contextmanager
def read_with_care(folder: SessionFolder) -> Iterator[None]:
    """Inside, what a stranger's bundle holds in a shape that nobody expects is an error of the bundle.

    In a session of our own the same is a defect of klbench, and stays one.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if not is_unpacked(folder):
            raise
        raise UsageError(
            "the bundle holds what this klbench does not understand",
            why=f"{type(error).__name__}: {error}"[:300],
            next="open it with the version that wrote it",
        ) from error


def is_unpacked(folder: SessionFolder) -> bool:
    """Whether the session came out of a bundle, here or by another program: it can be read, and nothing
    else."""
    return folder.path.resolve().parent == _place().resolve() or (folder.path / "bundle.json").exists()


def _place() -> Path:
    return paths.home() / "bundles"


# Writing.


def write_bundle(folder: SessionFolder, file: Path, redactor: Redactor | None) -> Path:
    """Writes the archive, atomically. Raises KlbenchError where the disk refuses, or where it would be larger
    than what `open_bundle` takes."""
    parts = list(_parts(folder))
    _check_size(parts)
    draft = file.with_name(f".{file.name}-{os.getpid()}")
    manifest = Manifest(
        schema=SCHEMA,
        klbench_version=klbench.__version__,
        made_at=time.time(),
        session=folder.name,
        redacted=redactor is not None,
    )
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, allowZip64=True) as archive:
            archive.writestr("bundle.json", msgspec.json.encode(manifest))
            for name, source in parts:
                content = _content(name, source)
                if redactor is not None:
                    redacted = _redacted(name, content, redactor)
                    if redacted is None:
                        continue
                    content = redacted
                archive.writestr(name, content)
        draft.chmod(0o600)
        os.replace(draft, file)
    except OSError as error:
        raise KlbenchError(f"cannot write {file}", why=error.strerror or str(error)) from error
    finally:
        draft.unlink(missing_ok=True)
    return file


def _parts(folder: SessionFolder) -> Iterator[tuple[str, Path]]:
    """Names in the archive and the files behind them; regular files only."""
    candidates = [folder.path / "session.json", folder.events]
    for place in (folder.runs, folder.reports, folder.exports):
        candidates += sorted(place.rglob("*"))
    candidates += sorted(folder.server.glob("*/server.log"))
    for file in candidates:
        name = file.relative_to(folder.path).as_posix()
        if _ALLOWED.fullmatch(name) and not file.is_symlink() and file.is_file():
            # A link among the folders above it may lead elsewhere, too.
            with contextlib.suppress(UsageError):
                yield name, folder.resolve(name)


def _check_size(parts: Sequence[tuple[str, Path]]) -> None:
    sizes = {name: source.stat().st_size for name, source in parts if not name.startswith("server/")}
    logs = LOG_TAIL_BYTES * (len(parts) - len(sizes))
    if sum(sizes.values()) + logs <= MAX_BYTES and len(parts) < MAX_ENTRIES:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    raise KlbenchError(
        "the bundle would be too large to be opened",
        why=f"{len(parts)} files of {size(sum(sizes.values()))}; the largest is {largest}",
        next="remove what nobody needs from the session's exports/ and reports/",
    )


def _content(name: str, file: Path) -> bytes:
    with open_regular(file) as source:
        if name.startswith("server/"):
            source.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            return source.read(LOG_TAIL_BYTES)
        return source.read(MAX_BYTES)


def _redacted(name: str, content: bytes, redactor: Redactor) -> bytes | None:
    """The part without what it must not carry; None for a part that is nothing else."""
    if name == "events.jsonl":
        lines = [_redacted_line(line, redactor) for line in content.split(b"\n") if line.strip()]
        return b"".join(line + b"\n" for line in lines if line is not None)
    if name == "session.json":
        return _redacted_json(content, redactor)
    if name.startswith("server/"):
        text = content.decode("utf-8", errors="replace")
        kept = [line for line in text.split("\n") if not _PROMPT_LINE.search(line)]
        return redactor.text("\n".join(kept)).encode()
    if name.startswith("runs/") and name.endswith(".npz"):
        from klbench.session.columns import without_prompts

        return without_prompts(content)
    if name.startswith("exports/"):
        # The tensors are the model's own, and are the finding.
        if name.endswith(".json"):
            return _redacted_json(content, redactor)
        is_tensors = name.endswith(".safetensors")
        return content if is_tensors else redactor.text(content.decode("utf-8", errors="replace")).encode()
    # Reports are written anew, redacted.
    return content if "-redacted" in name else None


def _redacted_line(content: bytes, redactor: Redactor) -> bytes | None:
    """A line of the event log, with the checksum of what is left in it."""
    try:
        line = msgspec.json.decode(content, type=_LogLine)
        return encode_line(line.seq, line.at, redactor.data(line.event))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _LogLine(msgspec.Struct):
    seq: int
    at: float
    event: Any


def _redacted_json(content: bytes, redactor: Redactor) -> bytes | None:
    try:
        return msgspec.json.encode(redactor.data(msgspec.json.decode(content)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


# Reading.


def open_bundle(path: Path) -> SessionFolder:
    """Unpacks the bundle into a folder of its own under the state folder (once) and returns the session.

    Raises UsageError for anything that is not a bundle of a known version, whole and within its bounds.
    """
    # Its module imports numpy, which a look at a session does without.
    from klbench.session.columns import UNREADABLE

    try:
        if path.stat().st_size > MAX_ARCHIVE_BYTES:
            raise _refused(path, f"it is larger than {MAX_ARCHIVE_BYTES} bytes")
        target = paths.make_private(_place()) / _digest(path)
        if not SessionFolder(target).exists():
            _unpack(path, target)
    except (OSError, zipfile.BadZipFile, *UNREADABLE) as error:
        raise _refused(path, str(error)) from error
    return SessionFolder(target)


def _unpack(path: Path, target: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".bundle-", dir=target.parent))
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _checked(path, archive)
            left = MAX_BYTES
            for entry in entries:
                file = draft / entry.filename
                paths.make_private(file.parent)
                with archive.open(entry) as source, open(file, "xb") as output:
                    left -= _copy(path, source, output, left)
        _check_manifest(path, draft)
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _checked(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries, when all of them may be unpacked. Raises UsageError."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > MAX_ENTRIES:
        raise _refused(path, f"it has more than {MAX_ENTRIES} entries")
    seen: set[str] = set()
    for entry in entries:
        mode = entry.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise _refused(path, f"{entry.filename!r} is a link or another special file")
        if ".." in entry.filename.split("/") or not _ALLOWED.fullmatch(entry.filename):
            raise _refused(path, f"{entry.filename!r} has no place in a bundle")
        if entry.filename.lower() in seen:
            raise _refused(path, f"{entry.filename!r} is there twice")
        if entry.flag_bits & 0x1:
            raise _refused(path, f"{entry.filename!r} is encrypted")
        seen.add(entry.filename.lower())
    if sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise _refused(path, f"it unpacks to more than {MAX_BYTES} bytes")
    return entries


def _copy(path: Path, source: IO[bytes], output: IO[bytes], most: int) -> int:
    """Copies at most `most` bytes, whatever the header promised; returns how many."""
    done = 0
    while block := source.read(_BLOCK):
        done += len(block)
        if done > most:
            raise _refused(path, f"it unpacks to more than {MAX_BYTES} bytes")
        output.write(block)
    return done


def _check_manifest(path: Path, folder: Path) -> None:
    try:
        manifest = msgspec.json.decode(read_small(folder / "bundle.json"), type=Manifest)
    except FileNotFoundError as error:
        raise _refused(path, "it has no bundle.json") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, str(error)) from error
    if manifest.schema != SCHEMA:
        raise UsageError(
            f"{path} has the format {manifest.schema!r}; this klbench reads {SCHEMA!r}",
            why=f"klbench {manifest.klbench_version} wrote it",
            next="open it with that version",
        )
    if not (folder / "session.json").is_file():
        raise _refused(path, "it holds no session")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:24]


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no klbench bundle that can be read", why=why, next="ask for a new one")


def bundle_file(folder: SessionFolder, output: Path | None) -> Path:
    """Where a bundle goes: as asked, else into the session's reports."""
    return output if output is not None else folder.reports / f"{folder.name}{ENDING}"
