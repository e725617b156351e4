#!/usr/bin/env python3
"""Put real output into README.md: what stands between `<!-- output: COMMAND -->` and `<!-- /output -->`.

usage: readme_outputs.py [--check]      run it with the Python that has kvwatch installed, from the repository's root

The first line of a block (the `$ …` line a reader sees) stays; the rest becomes what COMMAND prints, 80 columns wide.
With --check nothing is written and a stale block is exit code 1.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(<!-- output: (.+?) -->\n```console\n\$ .*?\n)(.*?)(```\n<!-- /output -->)", re.DOTALL)
README = Path("README.md")


def printed_by(command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"`{command}` printed nothing: {done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    fresh = BLOCK.sub(lambda block: block[1] + printed_by(block[2]) + block[4], text)
    if fresh == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("README.md shows output that the commands no longer print: run `make generate`", file=sys.stderr)
        return 1
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
