"""What the comparison of load generators says, and what it leaves behind: nothing."""

import http.server
import threading
from pathlib import Path

import pytest

from bench.endpoint import OUTPUT_TOKENS, SERVER_TTFT, beyond_server, compared, run_guidellm, ttft_of_server

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


HISTOGRAM = b"""# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:time_to_first_token_seconds_sum{engine="1"} 0.5
vllm:time_to_first_token_seconds_count{engine="0"} 90.0
vllm:time_to_first_token_seconds_count{engine="1"} 10.0
vllm:time_to_first_token_seconds_created{engine="0"} 1.7e+09
"""


def test_the_servers_own_time_to_first_token_is_read() -> None:
    """Would catch buckets taken for sums, one engine of two, and a server without metrics that ends the bench."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(HISTOGRAM)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = ttft_of_server(url), ttft_of_server(f"{url}/other")
        server.shutdown()
        thread.join()
    assert found == ((2.0, 100.0), (0.0, 0.0))
    assert ttft_of_server("http://127.0.0.1:1") == (0.0, 0.0)
    assert beyond_server([{"ttft_p50_ms": 23.0, SERVER_TTFT: 20.0}]) == {"server_ms": 20.0, "later_ms": 3.0}
    assert beyond_server([{"ttft_p50_ms": 23.0}]) is None


def test_agreement_is_within_the_tools_own_spread() -> None:
    """Would catch a ratio beyond that spread which passes, and one that is judged by a spread without end."""

    def loads(*values: float) -> list[dict[str, float]]:
        return [{"ttft_p50_ms": v, "tpot_p50_ms": v, "output_tokens_per_s": v} for v in values]

    def agrees(theirs: list[dict[str, float]], mine: list[dict[str, float]]) -> bool | None:
        (found,) = {row["agrees"] for row in compared(theirs, mine).values()}
        return found

    assert agrees(loads(10, 11), loads(11.2)) is True
    assert agrees(loads(10, 11), loads(12)) is False
    assert agrees(loads(10, 11), loads(9)) is False
    assert agrees(loads(10, 21), loads(15)) is None
