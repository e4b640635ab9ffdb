"""What must stay fast, as ratios of two things measured in one run; never as times.

Processor time of two things done one right after the other, in the best of several pairs, against bounds some
times wider than what was seen, so that a busy machine fails none; a step that becomes a loop over tokens, or
grows faster than its input, fails in every pair.
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

PAIRS = 20


def costs_less(way, than, times):
    """Whether one takes less than so many times the other's processor time, in at least one pair."""
    return any(timed(way).cpu_s < times * timed(than).cpu_s for _ in range(PAIRS))


def located(trace, divergent):
    return lambda: localise(trace, [align(trace, 0)], divergent)


def test_localising_costs_a_bounded_number_of_passes_over_the_digests():
    trace, divergent = make_trace(1_000_000)
    # Seen: 31 to 60.
    assert costs_less(located(trace, divergent), one_pass(trace), 200)


def test_localising_grows_no_faster_than_the_digests():
    few, many = make_trace(500_000), make_trace(4_000_000)
    growth = len(many[0].digest) / len(few[0].digest)
    # Seen: 2 to 3.2 for 8 times as many, for what does not grow is a part of the few.
    assert costs_less(located(*many), located(*few), 2 * growth)


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

    assert costs_less(ours, theirs, 1.5)


@pytest.mark.server
@pytest.mark.timeout(3600)
def test_digests_are_a_tenth_of_the_dumpers_bytes_and_far_faster(demo_server):
    demo = demo_server("dense")
    # Passes of its own: the tests on this server count from one.
    meter = Meter(ZooServer(demo.url, demo.control_dir, demo.nonce, 0.0), first_pass=500_000_000)
    # Seen: the dumper's decode step takes 12 times the digests'.
    digest, dumper = (one_round(meter, mode, steps=16) for mode in ("digest", "dumper"))
    assert 10 * digest.size_bytes < dumper.size_bytes
    assert digest.files < 10 < dumper.files
    assert 2 * digest.decode_ms < dumper.decode_ms
