"""What must stay fast, as ratios of two things measured in one run; never as times.

Processor time, the best of several turns, against bounds some times wider than what was seen, so that a busy
machine fails none; a step that becomes a loop over tokens, or grows faster than its input, fails.
"""

import json

import numpy as np
import pytest

from klbench.core.alignment import align
from klbench.core.localisation import localise
from klbench.engine.answers import AnswerStream
from tests.bench.capture import Meter, one_round
from tests.bench.localise import make_trace, one_pass
from tests.bench.measure import timed
from tests.insitu.zoo_server import ZooServer

TURNS = 5


def best_s(way):
    """Seconds of the processor, of the best turn."""
    return min(timed(way).cpu_s for _ in range(TURNS))


def located(trace, divergent):
    return lambda: localise(trace, [align(trace, 0)], divergent)


def test_localising_costs_a_bounded_number_of_passes_over_the_digests():
    trace, divergent = make_trace(1_000_000)
    # Seen: 31 to 60.
    assert best_s(located(trace, divergent)) < 200 * best_s(one_pass(trace))


def test_localising_grows_no_faster_than_the_digests():
    few, many = make_trace(500_000), make_trace(4_000_000)
    growth = len(many[0].digest) / len(few[0].digest)
    # Seen: 2 to 3.2 for 8 times as many, for what does not grow is a part of the few.
    assert best_s(located(*many)) < 2 * growth * best_s(located(*few))


def test_decoding_a_response_costs_no_more_than_pythons_own_parser():
    # Seen: 0.5 to 0.7 of it.
    nats = (-8 * np.random.default_rng(1).random(3500)).astype(np.float32)
    entries = [[value, place, None] for place, value in enumerate(nats.tolist())]
    answer = {"output_ids": [], "meta_info": {"id": "r", "input_token_logprobs": entries}}
    body = json.dumps([answer] * 8).encode()

    def ours():
        stream = AnswerStream(8)
        for at in range(0, len(body), 65536):
            stream.feed(body[at : at + 65536])
        assert len(stream.finish()) == 8

    def theirs():
        for one in json.loads(body):
            scored = one["meta_info"]["input_token_logprobs"]
            np.array([nats for nats, _, _ in scored])
            np.array([token for _, token, _ in scored])

    assert best_s(ours) < 1.5 * best_s(theirs)


@pytest.mark.server
@pytest.mark.timeout(600)
def test_digests_are_a_tenth_of_the_dumpers_bytes_and_far_faster(demo_server):
    demo = demo_server("dense")
    # Passes of its own: the tests on this server count from one.
    meter = Meter(ZooServer(demo.url, demo.control_dir, demo.nonce, 0.0), first_pass=500_000_000)
    digest, dumper = (one_round(meter, mode, steps=16) for mode in ("digest", "dumper"))
    assert 10 * digest.size_bytes < dumper.size_bytes
    assert digest.files < 10 < dumper.files
    assert 2 * digest.decode_ms < dumper.decode_ms
