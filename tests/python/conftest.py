"""Lets the tests import what stands beside them, from whatever folder they are run."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
