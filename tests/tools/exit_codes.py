"""Writes the README's table of exit codes from the code: `uv run python -m tests.tools.exit_codes`."""

from __future__ import annotations

from klbench.errors import ExitCode
from tests.bench.measure import markdown
from tests.tools.readme import README, write_part


def exit_code_table() -> list[str]:
    """Every exit code with its meaning as a Markdown table, in ascending order."""
    rows = [[str(int(code)), code.in_full.replace("|", "\\|")] for code in sorted(ExitCode)]
    return ["", *markdown(["exit code", "meaning"], rows), ""]


def main() -> None:
    write_part("exit-codes", exit_code_table())
    print(f"{len(ExitCode)} exit codes in {README.name}")


if __name__ == "__main__":
    main()
