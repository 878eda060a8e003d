"""Every Python block of the docs, as it stands there: the blocks of a page in order, in one
namespace. ```python vllm marks those that need vLLM."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[pathlib.Path, str, list[tuple[int, str]]]]:
    found: dict[tuple[pathlib.Path, str], list[tuple[int, str]]] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2))
            found.setdefault((page, match[1].strip()), []).append((line, match[2]))
    return [(page, kind, code) for (page, kind), code in found.items()]


def test_there_are_blocks():
    pages = {page.name for page, _, _ in blocks()}
    assert {"README.md", "python.md", "transformers.md", "xpu_fused_moe.md"} <= pages


@pytest.mark.parametrize("page, kind, code", blocks(),
                         ids=[f"{page.name}{'-' if kind else ''}{kind}" for page, kind, _ in blocks()])
def test_blocks_run(page, kind, code, tmp_path):
    assert kind in ("", "vllm"), f"{page.name}: unknown kind of block {kind!r}"
    if kind == "vllm":
        try:
            import vllm  # noqa: F401
        except ImportError:
            if os.environ.get("FUSEDMOE_REQUIRE_VLLM"):
                raise
            pytest.skip("vllm is not installed")
    # Lines as in the page, so that an error names the right one.
    lines: list[str] = []
    for line, text in code:
        lines += [""] * (line - len(lines)) + text.splitlines()
    script = tmp_path / f"docs_{page.stem}.py"  # no module of that name may be shadowed
    script.write_text("\n".join(lines) + "\n")
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True,
                            text=True, check=False, timeout=300)
    assert result.returncode == 0, f"{page.name}:\n{result.stdout}\n{result.stderr}"
