"""The package is typed: its own code and stubs are sound, and a user's mistakes are seen."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import fusedmoe


def mypy(*arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mypy", *arguments], cwd=cwd, capture_output=True,
                          text=True, check=False)


def test_the_package_is_sound(tmp_path):
    package = pathlib.Path(fusedmoe.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_core.pyi").is_file()
    config = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    result = mypy("--config-file", str(config), "-p", "fusedmoe", cwd=tmp_path)
    assert result.returncode == 0, result.stdout


def test_mistakes_are_seen(tmp_path):
    (tmp_path / "user.py").write_text("""
import fusedmoe

config = fusedmoe.MoeConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1)
plan = fusedmoe.FusedMoe.create(config, fusedmoe.ExpertWeights())
size: int = plan.workspace_size(3).bytes
plan.workspace_size("3")
fusedmoe.MoeConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1, activation="swish")
fusedmoe.PlanOptions(weight_storage="mine")
""")
    result = mypy("user.py", cwd=tmp_path)
    lines = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in lines] == ["7", "8", "9"], result.stdout
