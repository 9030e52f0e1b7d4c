"""A stage of `bench.gpu_check` that ends as its argument says: python -m tests.fake_stage good|fails|hangs|garbage."""

from __future__ import annotations

import subprocess
import sys
import time

HEADER = "| model | side, kind | step s |\n|---|---|---|"

if __name__ == "__main__":
    if sys.argv[1] == "garbage":
        print("\x00\x9d | not | a table\n| of no | header |\n|---|\n", flush=True)
    else:
        print(HEADER, f"| {sys.argv[1]} | meshwright, none | 0.5 |", "the last word", sep="\n", flush=True)
    if sys.argv[1] == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(f"child {child.pid}", flush=True)
        time.sleep(60)
    sys.exit(3 if sys.argv[1] == "fails" else 0)
