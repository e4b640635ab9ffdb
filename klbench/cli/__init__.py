"""The command line. `main` is the only boundary that turns errors into exit codes.

Invariants: stdout is data and everything else goes to stderr; no Python traceback reaches a terminal, it goes
to a crash file; nothing heavy (textual, numpy, httpx) is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from klbench import collecting
from klbench.errors import ExitCode, KlbenchError
from klbench.storage import refused_by_disk, storage_error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with collecting.put_off():
        from klbench.cli import failures, streams
        from klbench.cli.commands import klbench

    failures.VOICE.as_json = failures.value_of("--progress", arguments) == "json"
    try:
        streams.check()
        result: Any = klbench.main(args=arguments, prog_name="klbench", standalone_mode=False)
        streams.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        return failures.usage(error, arguments)
    except click.ClickException as error:
        return failures.known(KlbenchError(error.format_message()), ExitCode.USAGE, arguments)
    except KlbenchError as error:
        return failures.known(error, error.exit_code, arguments)
    except failures.Interrupted as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        streams.silence_stdout()
        return ExitCode.READER_GONE
    except SystemExit as end:
        if "_KLBENCH_COMPLETE" in os.environ:
            # click's own way out of completing for a shell.
            return end.code if isinstance(end.code, int) else 0
        # click's own answer to a broken pipe, and it would be 1: divergence found.
        streams.silence_stdout()
        return ExitCode.READER_GONE
    except OSError as error:
        if not refused_by_disk(error):
            return failures.defect(error, arguments)
        if error.filename is None:
            # Most likely stdout itself: what click left in its buffer would fail again at the very end.
            streams.silence_stdout()
        refusal = storage_error(error)
        return failures.known(refusal, refusal.exit_code, arguments)
    # The last boundary: whatever else was raised is a defect, and is kept where it can be reported from.
    except Exception as error:
        return failures.defect(error, arguments)
    return int(result) if isinstance(result, int) else ExitCode.CONSISTENT
