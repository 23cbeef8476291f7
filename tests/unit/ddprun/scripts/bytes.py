"""Writes what a launcher may tear, reorder or add to: bytes that are no text, bars, a line without an end."""

import os
import sys

print("out", "in", "pieces")
print("err", file=sys.stderr)
sys.stdout.buffer.write(bytes(range(256)) + b"\n")
sys.stderr.buffer.write(b"\r 10%\r 20%\x1b[31m red\x1b[0m\r100%\n")
print("[rank0]: torch's own prefix")
print("read", input())
print("x" * 200_000)
print("[rank0]: Traceback (most recent call last):", file=sys.stderr)
print("é", flush=True)
os.write(1, b"no newline at the end")
