"""The HTML report in a real browser: it draws its plots and has nothing to complain about."""

import re
import shutil
import subprocess

import msgspec
import pytest

from klbench.session.report import render
from tests.session.test_report import hostile
from tests.session.test_report_formats import a_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian's package: chromium)")
@pytest.mark.parametrize("strange", [False, True])
def test_a_browser_shows_the_plots_without_a_complaint(tmp_path, strange):
    report = a_report()
    if strange:
        report = msgspec.convert(hostile(msgspec.to_builtins(report)), type(report))
    page = tmp_path / "report.html"
    page.write_bytes(render(report, "html"))
    shown = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<svg") == 3
    assert len(re.findall(r'<rect class="mark"', shown.stdout)) > 3
    assert "<script" not in shown.stdout
