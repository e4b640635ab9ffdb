"""The real measuring and continuing on a server that is only arithmetic.

It generates from a hash of the prompt, scores with small differences, keeps a cache as long as it lives, and
says on stderr which arm it works on. `hold` names the helper and the arm in which it waits for ever.
"""

import asyncio
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from klbench.engine.answers import Generated, Logprobs
from klbench.engine.arms import ArmOptions, run_arms
from klbench.engine.facts import ServerFacts
from klbench.engine.prompts import PromptSet
from klbench.insitu.rids import parse_rid
from klbench.session import events as ev
from klbench.session.bench import Bench

PROMPTS = ((5, 6, 7), (8, 9, 10, 11), (12, 13))
NONCE = "fade"


def tokens_after(prompt, count):
    seed = zlib.crc32(bytes(token % 256 for token in prompt))
    return [(seed >> shift) % 97 + shift for shift in range(count)]


class Client:
    """The calls that arms make, answered by arithmetic on the ids."""

    def __init__(self, hold):
        self.hold = hold
        self.helper = ""
        self.cached = set()

    async def flush(self):
        self.cached.clear()

    async def tokenize(self, texts):
        return [[44] for _ in texts]

    async def generate(self, input_ids, *, max_new_tokens, rids, **_):
        arm = parse_rid(rids[0], NONCE).arm
        print(f"at {self.helper} {arm}", file=sys.stderr, flush=True)
        if (self.helper, arm) == self.hold:
            await asyncio.Event().wait()
        answers = []
        for rid, ids in zip(rids, map(list, input_ids), strict=True):
            hit = max((n for n in range(len(ids), 0, -1) if tuple(ids[:n]) in self.cached), default=0)
            output = tokens_after(ids, max_new_tokens)
            scored = None
            if arm == "scoring":
                hit = 0
                nats = np.array([np.nan, *(np.float32(-token / 7) for token in ids[1:])], dtype=np.float64)
                scored = Logprobs(nats, np.array(ids), 1)
            given = np.array([np.float32(-token / 7 - 1e-4) for token in output], dtype=np.float64)
            answers.append(
                Generated(
                    rid, len(ids), min(hit, len(ids) - 1), output, "length", 0, None, scored,
                    Logprobs(given, np.array(output, dtype=np.int64), 0),
                )
            )  # fmt: skip
            self.cached.update(tuple((ids + output)[:n]) for n in range(1, len(ids) + len(output) + 1))
        return answers


@dataclass
class Server:
    client: Client
    facts: ServerFacts
    owned: bool = True
    nonce: str = NONCE
    foreign_requests: int = 0
    retracted_requests: tuple[int, ...] = ()
    log: Path | None = None

    def why_not(self, _helper):
        return None

    def check_comparable(self):
        pass

    async def run_helper(
        self, helper, prompts, *, max_new_tokens, rids, observe, earlier=None, keep=None, flush=True
    ):
        self.client.helper = helper
        return await run_arms(
            self.client, helper, prompts, max_new_tokens=max_new_tokens, rids=rids, observe=observe,
            options=ArmOptions(flush=flush), earlier=earlier, keep=keep,
        )  # fmt: skip


class FakeBench(Bench):
    """The bench on the fake server; each start of it begins with an empty cache."""

    def __init__(self, session, hold=None, commit="a" * 40):
        super().__init__(session)
        facts = ServerFacts(
            model="/models/tiny", sglang_version="0.5.23", git_commit=commit, git_dirty=False, page_size=1,
            radix_cache=True, deterministic=True, device="cpu", tokenizer=False, context_length=4096,
        )  # fmt: skip
        self.fake = Server(Client(hold), facts)

    async def _ready_server(self, _job):
        if not self._session.state.server.ready:
            facts = self.fake.facts.as_dict()
            self._session.emit(ev.ServerReady(server=facts, url="http://127.0.0.1:1", launch_s=2.0))
        return self.fake

    async def _prompts_for(self, _server):
        source = os.environ.get("FAKE_PROMPTS", "made up")
        return PromptSet(source, PROMPTS)
