"""The Chromium that tests of the app and the report open. `python -m tests.browser` exits with 1 if there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser on the PATH, otherwise the one that Playwright downloaded."""
    for installed in filter(None, map(shutil.which, NAMES)):
        if subprocess.run([installed, "--version"], capture_output=True).returncode == 0:  # Ubuntu's only names a snap
            return installed
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as driver:
        downloaded = driver.chromium.executable_path
    return downloaded if Path(downloaded).exists() else None


if __name__ == "__main__":
    found = chromium()
    print(f"browser tests use {found}" if found else "no Chromium found", file=sys.stderr)
    sys.exit(0 if found else 1)
