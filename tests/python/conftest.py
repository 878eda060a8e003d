"""One thread for PyTorch's own maths keeps small cases quick; tests of threads set their own."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def golden_folder() -> pathlib.Path:
    return pathlib.Path(__file__).parents[1] / "golden"
