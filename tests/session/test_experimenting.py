"""Experiments of a session on a server that is only arithmetic: the plan and the outcomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from klbench.core.experiments import Configuration, configured_arguments
from klbench.engine.answers import Generated, Logprobs
from klbench.engine.arms import ArmOptions
from klbench.engine.capture_control import RequestIds
from klbench.engine.experiments import Passes
from klbench.engine.facts import ServerFacts
from klbench.errors import ExitCode, ServerError, UsageError
from klbench.session import events as ev
from klbench.session import experimenting
from klbench.session.experimenting import (
    ExperimentBench,
    experiment_document,
    experiment_exit_code,
    known_experiments,
    make_experiments,
)
from klbench.session.log import Entry
from klbench.session.request import Options, StartRequest, Target
from klbench.session.state import SessionState

NONCE = "fade"
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
FACTS = ServerFacts(
    device="cpu", radix_cache=True, page_size=1, overlap=True, deterministic=True, chunked_prefill_size=4096
)


class Client:
    """Answers arms by arithmetic. Restored prefixes change decode logprobs by `wrong_restore` nats, each new
    generation by `race` nats. Every forward is written down as the plugin does."""

    def __init__(self, folder: Path, wrong_restore: float = 0.0, race: float = 0.0) -> None:
        self.log = folder / "forwards-0.jsonl"
        self.wrong_restore, self.race = np.float32(wrong_restore), race
        self.wrong_lengths: Callable[[int], bool] = lambda hit: hit > 0
        self.cached: set[tuple[int, ...]] = set()
        self.forwards = self.generations = 0
        self.with_others = 0
        """In so many generations every forward holds foreign rows, each another number."""

    async def flush(self) -> None:
        self.cached.clear()

    async def tokenize(self, texts: list[str]) -> list[list[int]]:
        return [[44] for _ in texts]

    async def generate(self, input_ids, *, max_new_tokens, rids, **__) -> list[Generated]:
        answers, parts = [], []
        scoring = "-s" in rids[0] or max_new_tokens == 0
        self.generations += not scoring
        for rid, ids in zip(rids, map(list, input_ids), strict=True):
            longest = range(len(ids) - 1, 0, -1)
            hit = 0 if scoring else max((n for n in longest if tuple(ids[:n]) in self.cached), default=0)
            output: list[int] = []
            for _ in range(max_new_tokens):
                output.append((sum(ids) + sum(output) + 3) % 97)
            scored = Logprobs(np.array([np.nan, *(self._nats(t) for t in ids[1:])]), np.array(ids), 1)
            shift = (self.wrong_restore if hit and self.wrong_lengths(hit) else 0.0) + self.race * (
                self.generations % 2
            )
            given = np.array([np.float32(self._nats(t) + shift) for t in output], dtype=np.float64)
            ended = Logprobs(given, np.array(output, dtype=np.int64), 0)
            answers.append(Generated(rid, len(ids), hit, output, "length", 0, None, scored, ended))
            parts.append((rid, hit, len(ids)))
            self.cached.update(tuple((ids + output)[:n]) for n in range(1, len(ids) + len(output) + 1))
        self._write("extend", [[rid, hit, n - hit, hit, n, "extend"] for rid, hit, n in parts])
        for step in range(max_new_tokens - 1):
            self._write(
                "decode", [[rid, n + step, 1, n + step, n + step + 1, "decode"] for rid, _, n in parts]
            )
        return answers

    @staticmethod
    def _nats(token: int) -> float:
        return float(np.float32(-token / 7))

    def _write(self, mode: str, requests: list[list[Any]]) -> None:
        self.forwards += 1
        foreign = self.forwards if 0 < self.generations <= self.with_others else 0
        rows = foreign + sum(r[2] for r in requests)
        line = {"n": self.forwards, "mode": mode, "rows": rows, "requests": requests}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Server:
    client: Client
    facts: ServerFacts
    control_dir: Path
    launch_s: float = 40.0
    owned: bool = True
    nonce: str = NONCE
    info: dict[str, Any] = field(default_factory=dict)

    def arm_options(self) -> ArmOptions:
        return ArmOptions(separator_ids=(44,))


@dataclass
class Job:
    asked: list[str] = field(default_factory=list)
    agrees: bool = True

    def progress(self, *_: Any) -> None: ...

    async def ask(self, what: str, why: str, *, agree_with: str) -> None:
        self.asked.append(what)
        if not self.agrees:
            raise UsageError(f"it needs your agreement to {what}", why=why, next=f"agree with {agree_with}")


class Session:
    """Folds what is emitted, as a runner does."""

    def __init__(self, folder: Path) -> None:
        options = Options(max_new_tokens=4)
        self.start = StartRequest(target=Target(kind="demo", model="dense"), options=options)
        self.state = SessionState()
        self.folder = type("Folder", (), {"path": folder})()

    def emit(self, event: ev.Event) -> Entry:
        entry = Entry(self.state.seq + 1, 0.0, event)
        self.state = self.state.apply(entry)
        return entry


class Lab:
    """A session with a measured base pass; `reconfigured` are the configurations that were started."""

    def __init__(self, tmp_path: Path, *, obeys: bool = True, fails: bool = False, **faults: float) -> None:
        self.folder, self.faults, self.obeys, self.fails = tmp_path, faults, obeys, fails
        self.session, self.job = Session(tmp_path), Job()
        self.server = self._new(FACTS)
        self.reconfigured: list[Configuration] = []
        self.ids: dict[int, RequestIds] = {}

    def _new(self, facts: ServerFacts) -> Server:
        place = self.folder / f"server-{len(list(self.folder.iterdir()))}"
        place.mkdir()
        return Server(Client(place, **self.faults), facts, place)

    async def _reconfigure(self, configuration: Configuration) -> Server:
        self.reconfigured.append(configuration)
        if self.fails:
            raise ServerError("the server ended while importing")
        expected = {name: v for name, v in configuration.expect.items() if name != "quantised_kv"}
        return self._new(replace(FACTS, **expected) if self.obeys else FACTS)

    def _ids(self, server: Server) -> RequestIds:
        return self.ids.setdefault(id(server), RequestIds(NONCE))

    def make(self, *names: str, helper: str = "prefill_cache_hit", max_relaunches: int | None = None):
        async def work() -> None:
            passes = Passes(self.server, self._ids(self.server), max_new_tokens=4)
            base = await passes.helper(helper, PROMPTS)
            self.server.client.generations = 0
            await make_experiments(
                self.session, self.job, self.server, names, helper, PROMPTS,
                (self._ids(self.server).latest_pass, base.columns),
                ExperimentBench(self._reconfigure, self._ids), pass_s=2.0, max_relaunches=max_relaunches,
            )  # fmt: skip

        asyncio.run(work())
        return {made.name: made.result for made in self.session.state.experiments}


def test_repeats_of_a_steady_server_are_bit_identical(tmp_path: Path) -> None:
    result = Lab(tmp_path, wrong_restore=0.5).make("repeats")["repeats"]
    assert result["outcome"] == "same_bits"
    assert result["values"]["compared"] == 5
    assert "no race" in result["meaning"]


def test_other_bits_in_equal_batches_are_a_race(tmp_path: Path) -> None:
    result = Lab(tmp_path, race=0.25).make("repeats", helper="match")["repeats"]
    assert result["outcome"] == "differs"


@pytest.mark.parametrize(
    ("with_others", "passes", "outcome"),
    [(3, 5, "same_bits"), (7, 9, "same_bits"), (99, 15, "not_comparable")],
)
def test_repeats_go_on_until_two_had_the_same_batches_and_not_for_ever(
    tmp_path: Path, with_others: int, passes: int, outcome: str
) -> None:
    lab = Lab(tmp_path)
    lab.server.client.with_others = with_others
    result = lab.make("repeats", helper="match")["repeats"]
    assert (result["outcome"], result["values"]["passes"]) == (outcome, passes)


def test_without_a_log_of_batches_no_bits_are_compared(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.server.control_dir = None
    result = lab.make("repeats")["repeats"]
    # More passes would be no better seen.
    assert (result["outcome"], result["values"]["passes"]) == ("not_comparable", 5)


def test_a_request_alone_that_still_diverges_does_not_need_its_batch(tmp_path: Path) -> None:
    result = Lab(tmp_path, wrong_restore=0.5).make("alone")["alone"]
    assert (result["outcome"], result["values"]["request"]) == ("same_bits", 0)


def test_a_wrong_restore_shows_under_a_wide_extend(tmp_path: Path) -> None:
    result = Lab(tmp_path, wrong_restore=0.5).make("wide_restore")["wide_restore"]
    assert result["outcome"] == "differs"
    assert min(result["values"]["extend_rows"]) >= 128


def test_a_wide_extend_restores_exactly_as_many_tokens_as_before(tmp_path: Path) -> None:
    """A restore that is wrong at even lengths alone is no less wrong with more rows behind it."""
    lab = Lab(tmp_path, wrong_restore=0.5)
    lab.server.client.wrong_lengths = lambda hit: hit % 2 == 0
    result = lab.make("wide_restore")["wide_restore"]
    assert result["outcome"] == "differs"
    assert result["values"]["divergent_before"] == result["values"]["divergent_after"]


def test_equal_rows_are_proved_before_bits_are_compared(tmp_path: Path) -> None:
    clean = Lab(tmp_path).make("equal_m", helper="match")["equal_m"]
    assert (clean["outcome"], clean["values"]["rows"]) == ("same_bits", [3])
    (tmp_path / "other").mkdir()
    wrong = Lab(tmp_path / "other", wrong_restore=0.5).make("equal_m", helper="match")["equal_m"]
    assert (wrong["outcome"], wrong["values"]["differing"]) == ("differs", 3)


def test_what_is_not_possible_is_said_and_the_rest_is_made(tmp_path: Path) -> None:
    lab = Lab(tmp_path, wrong_restore=0.5)
    made = lab.make("graphs", "alone")
    assert made["graphs"]["outcome"] == "not_possible"
    assert made["alone"]["outcome"] == "same_bits"
    assert experiment_exit_code(lab.session.state) == ExitCode.UNDECIDED


def test_a_divergence_that_was_found_is_found_whatever_has_no_answer(tmp_path: Path) -> None:
    lab = Lab(tmp_path, race=0.25)
    made = lab.make("graphs", "repeats", helper="match")
    assert (made["graphs"]["outcome"], made["repeats"]["outcome"]) == ("not_possible", "differs")
    assert experiment_exit_code(lab.session.state) == ExitCode.DIVERGED


def test_each_configuration_is_started_once_and_settings_are_read_together(tmp_path: Path) -> None:
    lab = Lab(tmp_path, wrong_restore=0.5)
    made = lab.make("page_size", "overlap", max_relaunches=3)
    assert [configuration.name for configuration in lab.reconfigured] == [
        "--page-size 16", "--page-size 64", "--disable-overlap-schedule",
    ]  # fmt: skip
    assert len(made["page_size"]["values"]["settings"]) == 2
    assert made["overlap"]["outcome"] == "same_bits"


def test_a_flag_that_changed_nothing_is_read_back(tmp_path: Path) -> None:
    made = Lab(tmp_path, obeys=False).make("overlap", max_relaunches=1)
    assert made["overlap"]["outcome"] == "no_effect"
    assert "did not take effect" in made["overlap"]["text"]


def test_a_server_that_does_not_start_is_an_answer(tmp_path: Path) -> None:
    made = Lab(tmp_path, fails=True).make("overlap", max_relaunches=1)
    assert made["overlap"]["outcome"] == "not_comparable"
    assert "ended while importing" in made["overlap"]["text"]


def test_experiments_that_are_cancelled_count_as_far_as_they_were_made(tmp_path: Path, monkeypatch) -> None:
    judged = []
    monkeypatch.setattr(experimenting, "judge_again", lambda session: judged.append(session.state.seq))
    lab = Lab(tmp_path, wrong_restore=0.5)

    async def cancelled(_configuration):
        raise asyncio.CancelledError

    lab._reconfigure = cancelled
    with pytest.raises(asyncio.CancelledError):
        lab.make("alone", "overlap", max_relaunches=1)
    assert [made.name for made in lab.session.state.experiments] == ["alone"]
    assert judged == [lab.session.state.seq]


def test_relaunches_are_asked_for_above_a_minute_and_never_beyond_the_limit(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.make("page_size")
    assert lab.job.asked == ["start the server again 2 times, about 80 s"]
    with pytest.raises(UsageError, match="2 relaunches") as refused:
        Lab(tmp_path).make("page_size", max_relaunches=1)
    assert refused.value.next == "allow them: --max-relaunches 2"
    silent = Lab(tmp_path)
    silent.job.agrees = False
    with pytest.raises(UsageError) as unasked:
        silent.make("page_size")
    assert "--max-relaunches 2" in unasked.value.next
    assert not silent.reconfigured


def test_an_attached_server_is_not_started_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.server.owned = False
    assert "cannot start it again" in lab.make("overlap")["overlap"]["text"]
    assert not lab.reconfigured


def test_the_document_has_the_plan_and_every_outcome(tmp_path: Path) -> None:
    lab = Lab(tmp_path, wrong_restore=0.5)
    lab.make("repeats", "graphs")
    document = experiment_document(tmp_path, lab.session.state)
    assert document["schema"] == "klbench.experiment/1"
    assert document["plan"]["launches"] == 0
    assert list(document["plan"]["impossible"]) == ["graphs"]
    assert {one["name"] for one in document["experiments"]} == {"repeats", "graphs"}
    assert document["helper"] == "prefill_cache_hit"


def test_names_are_checked_before_anything_starts() -> None:
    assert known_experiments(["alone", "repeats", "alone"]) == ("alone", "repeats")
    with pytest.raises(UsageError, match="no experiment 'nonsense'"):
        known_experiments(["nonsense"])


def test_arguments_of_a_configuration_replace_the_users() -> None:
    users = ("--page-size", "16", "--page-size=32", "--tp-size", "1")
    wanted = Configuration(("--page-size", "64"), {}, ("--page-size",))
    assert configured_arguments(users, wanted) == ("--tp-size", "1", "--page-size", "64")
    assert configured_arguments(users, Configuration()) == users


def test_padding_predicts_first_and_a_residue_that_does_not_decide_is_refuted(tmp_path: Path) -> None:
    lab = Lab(tmp_path, wrong_restore=0.5)
    result = lab.make("pad:cached_tokens%3=2")["pad"]
    plan = lab.session.state.experiment_plan
    assert "cached tokens = 2 mod 3" in plan["predictions"]["pad"]
    assert result["values"]["prediction"] == plan["predictions"]["pad"]
    # Every restored prefix is wrong here, whatever its length.
    assert result["outcome"] == "refuted"
    assert result["values"]["reached"] == result["values"]["reached_beside"] == len(PROMPTS)
    assert result["values"]["divergent"] == result["values"]["divergent_beside"] == len(PROMPTS)


def test_a_residue_that_decides_is_seen_as_predicted(tmp_path: Path) -> None:
    lab = Lab(tmp_path, wrong_restore=0.5)
    lab.server.client.wrong_lengths = lambda hit: hit % 4 == 1
    result = lab.make("pad:cached_tokens%4=1")["pad"]
    assert result["outcome"] == "predicted"
    assert result["values"]["divergent"] == len(PROMPTS)
    assert result["values"]["divergent_beside"] == 0


def test_padding_without_a_striking_residue_asks_for_one(tmp_path: Path) -> None:
    result = Lab(tmp_path, wrong_restore=0.5).make("pad")["pad"]
    assert result["outcome"] == "not_possible"
    assert "pad:cached_tokens%8=3" in result["text"]


@pytest.mark.parametrize(
    "name", ["pad:", "pad:cached_tokens%0=0", "pad:rows%8=3", "repeats:3", "pad:prompt_len%4=4"]
)
def test_a_parameter_that_cannot_be_read_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        known_experiments([name])
    assert "pad:cached_tokens%8=3" in raised.value.next
