#!/usr/bin/env bash
# Goal: the program of the README is the one that is built, and learns, sharded, on two ranks as alone. Method: compare the
# block of code with the file; run the program alone and by the launcher; the last loss must be below 0.6 of the first.
set -euo pipefail

awk '/^```cpp$/ {inside = 1; next} /^```$/ {inside = 0} inside' README.md | diff - apps/examples/my_trainer.cc

learns() {
  awk 'NR == 1 {first = $2} {last = $2} END {print "loss", first, "to", last; exit !(NR == 20 && last < 0.6 * first)}'
}

apps/examples/my_trainer | learns
apps/tessera launch --nproc-per-node 2 -- apps/examples/my_trainer | learns
