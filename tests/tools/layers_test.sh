#!/usr/bin/env bash
# Goal: the repository keeps the order of its folders and its conventions. Method: tools/check_layers.py on all of it.
# The files tested are not declared to Bazel: the link to one of them leads to the repository, and the test is tagged
# "external" so that no result is kept.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f tools/layers.txt)")")
exec python3 -B "$root/tools/check_layers.py" "$root"
