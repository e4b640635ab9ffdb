"""One folder under two paths: each side is told its own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.engine.path_map import PathMap, read_path_map
from klbench.errors import UsageError

NAME = st.text(st.sampled_from("abc.-_ é"), min_size=1, max_size=6).filter(lambda n: n not in (".", ".."))
PARTS = st.lists(NAME, max_size=4).map("/".join)


def test_both_sides_get_their_own_path_and_what_is_not_mapped_stays() -> None:
    paths = read_path_map(["/work=/home/a/work", "/work/deep=/scratch"])
    assert paths.on_server(Path("/home/a/work/t/1")) == "/work/t/1"
    assert paths.on_server(Path("/scratch/x")) == "/work/deep/x"
    assert paths.here("/work/deep/x") == Path("/scratch/x")
    assert paths.here("/work") == Path("/home/a/work")
    # A folder whose name only begins alike is another folder.
    assert paths.here("/workshop/x") == Path("/workshop/x")
    assert paths.on_server(Path("/home/a/workshop")) == "/home/a/workshop"


@given(server=PARTS, here=PARTS, below=PARTS)
def test_a_path_goes_there_and_back(server: str, here: str, below: str) -> None:
    paths = read_path_map([f"/{server}=/h/{here}"]) if "=" not in server else PathMap()
    ours = Path("/h") / here / below
    assert paths.here(paths.on_server(ours)) == ours
    assert read_path_map(paths.spelled) == paths


@pytest.mark.parametrize("text", ["", "/a", "a=/b", "/a=", "=/b", "/a/../b=/c"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_path_map([text])
