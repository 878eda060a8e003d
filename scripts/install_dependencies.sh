#!/bin/sh
# Installs the Debian packages that a target needs and that are missing: with apt when run by root
# or through sudo; otherwise it prints the one line to run and stops.
#   scripts/install_dependencies.sh [build|check|python]
set -eu

packages="g++ cmake ninja-build pkg-config libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev
  libjs-d3 python3"
case "${1:-build}" in
  check) packages="$packages clang clang-format clang-tidy libclang-rt-14-dev binutils" ;;
  python) packages="$packages python3-dev python3-venv" ;;
esac

missing=""
for package in $packages; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

install="apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" = 0 ]; then
  run=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
  run=sudo
else
  echo "fusedmoe: these Debian packages are missing; run this line once, then repeat:" >&2
  echo "  sudo apt-get update && sudo $install" >&2
  exit 1
fi
echo "fusedmoe: installing$missing"
export DEBIAN_FRONTEND=noninteractive
$run apt-get update -qq
$run $install -qq >/dev/null
