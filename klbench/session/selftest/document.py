"""klbench.selftest/1: what a selftest did so far, in a file that is whole after every case.

    {"schema": "klbench.selftest/1", "options": {...}, "code_sha256": "...", "made": {"date": "2026-11-29",
     "klbench_version": "...", "sglang_version": "...", "torch": "...", "machine": "x86_64, 2 cores, ..."},
     "planned": 130, "elapsed_s": 812.0, "cases": [...], "clean": [...], "summary": {...}}

Invariant: a file is taken up only where its options and klbench's code are the same; an error is tried again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import klbench
from klbench.core.accuracy_table import summary
from klbench.errors import ExitCode, KlbenchError
from klbench.session.documents import iso_time
from klbench.session.folder import write_atomically
from klbench.session.selftest.plan import Asked, Station, size

SCHEMA = "klbench.selftest/1"
_LARGEST_BYTES = 64 << 20

Key = tuple[str, str, str, str]


class Document:
    """The results as they come in. `place` is the file that holds them; None keeps them in memory."""

    def __init__(self, asked: Asked, stations: list[Station], place: Path | None) -> None:
        self._place = place
        self._began = time.monotonic()
        self._content: dict[str, Any] = {
            "schema": SCHEMA,
            "klbench_version": klbench.__version__,
            "code_sha256": code_sha256(),
            "started_at": iso_time(time.time()),
            "options": json.loads(json.dumps(dataclasses.asdict(asked))),
            "made": {},
            "planned": size(stations),
            "cases": [],
            "clean": [],
        }
        self._earlier_s = 0.0
        self.taken_up = self._take_up()

    def _take_up(self) -> int:
        """Takes over what an interrupted selftest of the same code and options has; returns how much."""
        earlier = _read(self._place)
        same = ("schema", "klbench_version", "code_sha256", "options", "planned")
        if any(earlier.get(name) != self._content[name] for name in same):
            return 0
        cases = [case for case in earlier.get("cases", []) if case.get("answer") != "error"]
        clean = [case for case in earlier.get("clean", []) if case.get("answer") != "error"]
        if len(cases) + len(clean) >= self._content["planned"]:
            # It is finished: asked for once more, it is made once more.
            return 0
        self._content |= {"cases": cases, "clean": clean, "made": earlier.get("made", {})}
        self._content["started_at"] = earlier.get("started_at", self._content["started_at"])
        self._earlier_s = float(earlier.get("elapsed_s") or 0.0)
        return len(cases) + len(clean)

    @property
    def done(self) -> set[Key]:
        """What has an answer."""
        return {key_of(entry) for entry in (*self._content["cases"], *self._content["clean"])}

    def seen(self, facts: Mapping[str, Any]) -> None:
        """Notes on what it is made, from the first server."""
        self._content["made"] = {
            "date": iso_time(time.time())[:10],
            "klbench_version": klbench.__version__,
            "sglang_version": facts.get("sglang_version"),
            "torch": facts.get("torch"),
            "device": facts.get("device"),
            "machine": machine(facts),
        }

    def add(self, entry: Mapping[str, Any], *, clean: bool) -> None:
        """Keeps one result, on disk too."""
        self._content["clean" if clean else "cases"].append(dict(entry))
        self.write()

    def as_dict(self, error: KlbenchError | None = None) -> dict[str, Any]:
        content = dict(self._content)
        content["elapsed_s"] = round(self._earlier_s + time.monotonic() - self._began, 3)
        content["summary"] = summary(content["cases"], content["clean"])
        if error is not None:
            content["error"] = error.as_dict()
        return content

    def write(self, error: KlbenchError | None = None) -> None:
        """Writes the file, whole or not at all. Raises KlbenchError."""
        if self._place is None:
            return
        try:
            write_atomically(
                self._place, msgspec.json.format(msgspec.json.encode(self.as_dict(error)), indent=1)
            )
        except OSError as failed:
            raise KlbenchError(f"cannot write {self._place}", why=failed.strerror or str(failed)) from failed


def key_of(entry: Mapping[str, Any]) -> Key:
    """What tells one result from another."""
    model, configuration, workload, fault = (
        str(entry[name]) for name in ("model", "configuration", "workload", "fault")
    )
    return model, configuration, workload, fault


def exit_code(document: Mapping[str, Any]) -> ExitCode:
    """1 where an answer is wrong or something clean was accused, 5 where an answer is missing, else 0."""
    counted = document["summary"]
    answers = counted["answers"]
    if answers["wrong"] or counted["false_accusations"]:
        return ExitCode.DIVERGED
    done = counted["cases"] + counted["clean_configurations"]
    open_answers = answers["undecided"] + answers["did_not_fire"] + answers["error"]
    open_answers -= counted["could_not_fire"]
    if open_answers or counted["clean_without_answer"] or done < document["planned"]:
        return ExitCode.UNDECIDED
    return ExitCode.CONSISTENT


def code_sha256() -> str:
    """The hexadecimal SHA-256 of klbench's own source: answers of other code are other answers."""
    found = hashlib.sha256()
    package = Path(klbench.__file__).parent
    for file in sorted(package.rglob("*.py")):
        found.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def machine(facts: Mapping[str, Any]) -> str:
    """The machine in words, without its name."""
    gpus = list(facts.get("gpus") or ())
    if gpus:
        return f"{len(gpus)} {gpus[0]}"
    parts = [platform.machine(), f"{os.cpu_count()} cores"]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ", ".join([*parts, *([name] if name else [])])


def _read(place: Path | None) -> dict[str, Any]:
    if place is None:
        return {}
    try:
        if place.stat().st_size > _LARGEST_BYTES:
            return {}
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
