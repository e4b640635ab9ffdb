"""What is left alone while something starts: the garbage collector, the threads of numpy's linear algebra."""

import gc
import os

import pytest

from klbench import blas, collecting


@pytest.fixture(autouse=True)
def _collects():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_something_starts_and_all_is_again_afterwards():
    with collecting.put_off():
        assert not gc.isenabled()
        with collecting.put_off():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the outer one has not ended
    assert gc.isenabled()


def test_collecting_begins_once_and_passes_over_what_is_there():
    frozen = gc.get_freeze_count()
    with collecting.put_off():
        collecting.begin()
        assert gc.isenabled()
        begun = gc.get_freeze_count()
        assert begun > frozen
        later = [[] for _ in range(1000)]
        collecting.begin()
        # What ends meanwhile leaves the count; nothing has come to it.
        assert gc.get_freeze_count() < begun + len(later) // 2
    assert gc.isenabled()


def test_only_the_import_goes_without_threads(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with blas.without_threads():
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_threads_that_the_user_has_set_stay(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    with blas.without_threads():
        assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
