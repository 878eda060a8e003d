"""The operators in Python: the tests of the operators again, in a process that asks for them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import fusedmoe


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment},
                          capture_output=True, text=True, check=False, timeout=300)


def test_the_tests_of_the_operators_pass_with_those_in_python():
    result = run(f"""
import pytest, sys
import fusedmoe.torch
assert fusedmoe.torch.OPERATOR.startswith("Python, since FUSEDMOE_TORCH_OPERATOR")
sys.exit(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-k", "not inductor",
                      *{[str(pathlib.Path(__file__).with_name(name))
                         for name in ("test_torch.py", "test_torch_watch.py")]!r}]))
""", FUSEDMOE_TORCH_OPERATOR="python")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and "failed" not in result.stdout


def test_an_unknown_choice_is_refused():
    result = run("import fusedmoe.torch", FUSEDMOE_TORCH_OPERATOR="rust")
    assert result.returncode != 0
    assert "FUSEDMOE_TORCH_OPERATOR: expected python, cpp or nothing, got 'rust'" in result.stderr


def test_asked_for_the_operators_in_cpp_it_does_not_fall_back_silently(tmp_path):
    package = pathlib.Path(fusedmoe.__file__).parent
    copy = tmp_path / "fusedmoe"
    copy.mkdir()
    for file in package.iterdir():
        if file.is_file() and file.name != "libfusedmoe_torch.so":
            (copy / file.name).symlink_to(file)
    code = "import fusedmoe; print(fusedmoe.__file__, fusedmoe.info()['torch_operator'])"
    result = run(code, PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in result.stdout
    assert "Python, since the package was built without PyTorch" in result.stdout
    result = run("import fusedmoe.torch", PYTHONPATH=str(tmp_path), FUSEDMOE_TORCH_OPERATOR="cpp")
    assert result.returncode != 0 and "built without PyTorch" in result.stderr
    (copy / "libfusedmoe_torch.so").write_bytes(b"not a library")
    result = run(code, PYTHONPATH=str(tmp_path))
    assert "Python, since libfusedmoe_torch.so does not load" in result.stdout
