"""The start screen offers the faults that have a place in the chosen model, and starts them so they fire."""

from pilots import press, screen_text, settle, workbench

from klbench.engine.demo_faults import faults_of
from klbench.tui.screens.start import FAULTS, MODELS
from klbench.tui.widgets.virtual_table import VirtualTable


def offered(app) -> list[str]:
    rows = app.screen.query_one("#faults", VirtualTable).rows
    return [FAULTS[rows.key(row)][0] for row in range(rows.count)]


async def choose(app, pilot, fault: str) -> None:
    """Puts the cursor on the fault."""
    table = app.screen.query_one("#faults", VirtualTable)
    table.focus()
    table.show_rows(table.rows, cursor_key=[name for name, _ in FAULTS].index(fault))
    await settle(pilot)
    await press(pilot, "down", "up")


async def test_each_model_is_offered_its_own_faults():
    async with workbench(None) as (app, pilot):
        await settle(pilot)
        for model, _ in MODELS:
            assert offered(app) == ["", *faults_of(model)]
            assert app.screen.demo().target.model == model
            await press(pilot, "down")


async def test_the_chosen_fault_stays_where_the_next_model_has_it_and_goes_where_it_has_not():
    async with workbench(None) as (app, pilot):
        await choose(app, pilot, "attention-split")
        app.screen.query_one("#models").focus()
        await press(pilot, "down")
        assert app.screen.demo().options.fault == "attention-split"
        await press(pilot, "end")
        assert app.screen.demo().target.model == "hybrid"
        assert app.screen.demo().options.fault is None
        assert "No fault" in screen_text(app)


async def test_a_fault_of_padding_starts_with_prompts_that_need_some():
    async with workbench(None, size=(120, 40)) as (app, pilot):
        await choose(app, pilot, "padding-scale")
        assert app.screen.demo().options.samples == 31
        assert "--samples 31" in " ".join(screen_text(app).split())
