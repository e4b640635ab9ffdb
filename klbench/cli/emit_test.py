"""`klbench emit-test`: measures the helpers, then writes a sglang test file with the threshold they allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from klbench.cli import options as opt


@click.command("emit-test", cls=opt.TargetCommand)
@opt.target_options
@opt.common_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The test file. Default: test_MODEL_kl.py here; its prompts lie beside it.",
)
@opt.json_option
def emit_test(
    demo: str | None,
    model_path: str | None,
    url: str | None,
    json_place: str | None,
    session: Path | None,
    output: Path | None,
    **options: Any,
) -> int:
    """Measure, then write a ready test file with sglang's own KL classes and the measured threshold.

    1e-9 where the path measures zero; otherwise the floor that klbench calibrate measured for this very
    configuration, and without one no file. Existing files are not overwritten.
    """
    start = opt.build_request(demo=demo, model_path=model_path, url=url, **options)
    file = _new_file(output or Path(f"test_{_word(start.target.label)}_kl.py"))
    from klbench.cli import headless
    from klbench.session.bench import make_work
    from klbench.session.emitting import write_test
    from klbench.session.folder import new_session_path

    folder = session or new_session_path(start.target.label)
    code = headless.execute(
        start, headless.Plan("run"), session=folder, json_place=json_place, make_work=make_work
    )
    if code not in (0, 1):
        return code
    from klbench.cli.failures import note

    for written in write_test(folder, start, file):
        note(f"wrote {written}")
    return code


def _word(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_") or "model"


def _new_file(file: Path) -> Path:
    """The file, which must not be there yet. Raises UsageError."""
    from klbench.engine.emit_test import PROMPTS_SUFFIX
    from klbench.errors import UsageError

    for wanted in (file, file.with_name(file.stem + PROMPTS_SUFFIX)):
        if wanted.exists():
            raise UsageError(f"{wanted} is there already", next="move it away or name another with --output")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.absolute().parent}")
    return file
