"""Keeps the key that klbench made for this server out of everything the server logs.

sglang logs its resolved arguments, the key among them. The log's records are changed where they are made,
because sglang replaces the handlers after plugins are loaded.
"""

import logging
from pathlib import Path
from typing import Any

_FILE = "launch.yaml"
_BEFORE = "api-key: "


def install(control_dir: Path) -> None:
    """Hides the key, if this launch has one, in each record that is logged from now on."""
    try:
        text = (control_dir / _FILE).read_text(encoding="ascii")
    except FileNotFoundError:
        return
    keys = [line[len(_BEFORE) :].strip() for line in text.splitlines() if line.startswith(_BEFORE)]
    for key in keys:
        _hide(key)


def _hide(key: str) -> None:
    make = logging.getLogRecordFactory()

    def without_key(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:
            return record
        if key in message:
            record.msg, record.args = message.replace(key, "***"), None
        return record

    logging.setLogRecordFactory(without_key)
