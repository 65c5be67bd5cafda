"""What the comparison of load generators leaves behind: nothing."""

from pathlib import Path

import pytest

from bench.endpoint import OUTPUT_TOKENS, run_guidellm

WRITES_WHERE_IT_STANDS = "#!/bin/sh\necho '{}' > benchmarks.json\necho x > benchmarks.csv\n"


def test_guidellm_writes_into_a_folder_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch its benchmarks.json and benchmarks.csv in the folder that the bench was called from."""
    program = tmp_path / "targets" / "guidellm" / "bin" / "guidellm"
    program.parent.mkdir(parents=True)
    program.write_text(WRITES_WHERE_IT_STANDS, encoding="utf-8")
    program.chmod(0o755)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    figures, _ = run_guidellm(tmp_path / "targets", "http://127.0.0.1:1", 5, 0)
    assert figures == {"tokens": 5.0 * OUTPUT_TOKENS}
    assert list(here.iterdir()) == []
