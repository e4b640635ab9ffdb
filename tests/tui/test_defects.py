"""A defect in the work behind a screen is told with a file to report it; what else is there stays."""

import pytest
from pilots import screen_text, workbench

from klbench.tui import connection

HIDDEN = "a value that may be a prompt"


async def test_columns_that_fail_to_load_by_a_defect_are_told_and_the_other_helpers_are_shown(
    finished, monkeypatch
):
    load = connection.load_measurement

    def fails_for_match(folder, run, helper):
        if helper.helper == "match":
            secret = HIDDEN
            raise TypeError(f"not so many: {len(secret)}")
        return load(folder, run, helper)

    monkeypatch.setattr(connection, "load_measurement", fails_for_match)
    shown, loaded = [], set()

    async def look() -> None:
        async with workbench(finished, size=(160, 45)) as (app, _pilot):
            shown.append(screen_text(app))
            loaded.update(helper for _, helper in app.model.measurements)

    with pytest.raises(TypeError):
        await look()
    assert "klbench failed: TypeError: not so many: 28" in shown[0]
    assert "this is a defect of klbench" in shown[0]
    assert loaded == {"prefill_cache_hit", "decode_cache_hit"}
    [crash] = finished.glob("crash-*.txt")
    kept = crash.read_text()
    assert "fails_for_match" in kept
    assert HIDDEN not in kept
    assert crash.stat().st_mode & 0o777 == 0o600
