"""bench/python/overhead.py runs and names every way to call; times are not tested."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys


def test_overhead_tells_of_every_way():
    script = pathlib.Path(__file__).parents[2] / "bench/python/overhead.py"
    result = subprocess.run([sys.executable, str(script), "--json", "--batches", "1", "--calls",
                             "3"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({row["way"] for row in rows}) == len(rows) == 9
    assert all(row["us_0_tokens"] > -100 and row["us_1_token"] > -100 for row in rows)
