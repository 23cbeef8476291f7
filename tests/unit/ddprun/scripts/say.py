"""What a rank is told: prints its environment's words as JSON; then lines that are long, torn and unfinished."""

import json
import os
import sys

print(json.dumps({"argv": sys.argv[1:], "path": sys.path[0], "name": __name__, "env": dict(os.environ)}))
for part in ("a line ", "in two ", "parts\n"):
    os.write(1, part.encode())
os.write(2, b"x" * 200_000 + b"\n")
for number in range(2_000):
    print("line", number)
os.write(1, b"no newline at the end")
