"""What a shell completes that only klbench knows."""

from __future__ import annotations

import click


def complete_sessions(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """The names of the sessions under the root; paths complete themselves."""
    from klbench.session.folder import all_sessions

    return [folder.name for folder in all_sessions() if folder.name.startswith(begun)]
