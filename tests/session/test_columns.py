"""Columns come back from disk bit for bit, or not at all."""

import ast
import dataclasses
import gc
import io
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from klbench.core.columns import HELPERS, HelperColumns
from klbench.errors import UndecidedError
from klbench.session.columns import load_columns, save_columns


@st.composite
def columns(draw):
    counts = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
    requests, tokens = len(counts), sum(count for count, _ in counts)
    prompts = sum(count for _, count in counts)

    def column(dtype, length):
        return draw(hn.arrays(dtype, length))

    return HelperColumns(
        helper=draw(st.sampled_from(HELPERS)),
        **{
            name: column(np.int64, requests)
            for name in ("prompt_len", "cached_generation", "cached_scoring", "output_len")
        },
        dropped=column(np.bool_, requests),
        start=np.cumsum([0, *(count for count, _ in counts)], dtype=np.int64),
        token_id=column(np.int32, tokens),
        decode_nats=column(np.float32, tokens),
        prefill_nats=column(np.float32, tokens),
        prompt_start=np.cumsum([0, *(count for _, count in counts)], dtype=np.int64),
        prompt_ids=column(np.int32, prompts),
    )


@given(columns())
@settings(max_examples=40, deadline=None)
def test_columns_round_trip_bit_for_bit(tmp_path_factory, written):
    file = tmp_path_factory.mktemp("columns") / "1-match.npz"
    save_columns(file, written)
    read = load_columns(file)
    for field in dataclasses.fields(HelperColumns):
        before, after = getattr(written, field.name), getattr(read, field.name)
        if field.name == "helper":
            assert before == after
        else:
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes()


def some_columns():
    ints = np.array([3, 4], dtype=np.int64)
    return HelperColumns(
        helper="match",
        prompt_len=ints,
        cached_generation=ints,
        cached_scoring=ints,
        output_len=ints,
        dropped=np.array([False, True]),
        start=np.array([0, 2, 2]),
        token_id=np.array([1, 2], dtype=np.int32),
        decode_nats=np.array([-1, np.nan], dtype=np.float32),
        prefill_nats=np.array([-1, -np.inf], dtype=np.float32),
        prompt_start=np.array([0, 1, 3]),
        prompt_ids=np.array([5, 6, 7], dtype=np.int32),
    )


def test_a_file_cut_anywhere_is_refused_and_named(tmp_path):
    file = tmp_path / "1-match.npz"
    save_columns(file, some_columns())
    content = file.read_bytes()
    for end in range(0, len(content), 37):
        file.write_bytes(content[:end])
        with pytest.raises(UndecidedError, match=r"1-match\.npz"):
            load_columns(file)


def rewrite(file, **changed):
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez_compressed(file, **{**arrays, **changed})


def test_a_lost_logprob_comes_back_and_older_files_lost_none(tmp_path):
    file = tmp_path / "1-match.npz"
    written = dataclasses.replace(
        some_columns(),
        lost=np.array([True, False]),
        decode_nats=np.array([np.nan, -2], dtype=np.float32),
    )
    save_columns(file, written)
    assert load_columns(file).lost.tolist() == [True, False]
    with np.load(file) as archive:
        older = {name: archive[name] for name in archive.files if name != "lost"}
    np.savez_compressed(file, **older)
    assert load_columns(file).lost.tolist() == [False, False]


@pytest.mark.parametrize(
    "changed",
    [
        {"start": np.array([0, 5, 2])},
        {"start": np.array([0, 2])},
        {"prompt_start": np.array([1, 1, 3])},
        {"dropped": np.array([True])},
        # A logprob that is there, a request without tokens, other numbers of requests, another type.
        {"lost": np.array([True, False])},
        {"lost": np.array([False, True])},
        {"lost": np.array([False])},
        {"lost": np.array([], dtype=np.bool_)},
        {"lost": np.array([0, 0])},
        {"decode_nats": np.array([1.0, 2.0])},
        {"token_id": np.zeros((2, 1), dtype=np.int32)},
        {"helper": np.array("other")},
        {"format": np.int64(2)},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(tmp_path, changed):
    file = tmp_path / "1-match.npz"
    save_columns(file, some_columns())
    rewrite(file, **changed)
    with pytest.raises(UndecidedError):
        load_columns(file)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_a_pickle_in_the_file_is_never_executed(tmp_path):
    file = tmp_path / "1-match.npz"
    save_columns(file, some_columns())
    rewrite(file, start=np.array([Bomb()], dtype=object))
    with pytest.raises(UndecidedError):
        load_columns(file)


def test_a_header_that_claims_a_huge_array_is_refused(tmp_path):
    file = tmp_path / "1-match.npz"
    save_columns(file, some_columns())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**60,)})
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["start.npy"] = header.getvalue()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(UndecidedError):
        load_columns(file)


class Garbage:
    """A cycle whose collection runs Python code, at which threads take turns."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.fixture
def restless():
    """Collects garbage, and switches between threads, as often as can be."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(7)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("restless")
def test_several_threads_read_columns_at_once(tmp_path, monkeypatch):
    """numpy parses headers by `ast.literal_eval`, in which two threads disturb each other before 3.11.8."""
    file = tmp_path / "1-match.npz"
    save_columns(file, some_columns())
    parse = ast.literal_eval

    def littered(text):
        for _ in range(3):
            Garbage()
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", littered)
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: load_columns(file).requests, range(200))) == {2}
