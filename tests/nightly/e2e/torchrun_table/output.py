"""Writes all kinds of output, and ends with all that Python does at its end."""

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading

import facts

LINES = 10_000


def work(name: str, begin: threading.Event) -> None:
    begin.wait()
    print(name, flush=True)


def mark(name: str) -> None:
    sys.stdout.flush()
    os.write(1, f"\n== {name}\n".encode())


if __name__ == "__main__":
    facts.start(globals())
    mark("binary bytes")
    sys.stdout.buffer.write(bytes(byte for byte in range(256) if byte != 10))
    mark("a line of 200,000 characters")
    print("x" * 200_000)
    mark("progress with \\r")
    for percent in range(0, 101, 10):
        print(f"\r{percent} %", end="", flush=True)
    mark("UTF-8")
    print("é, 漢字, 🎉")
    facts.fact("print of a surrogate", lambda: print("\udc80") or "")
    mark(f"{LINES} lines")
    for number in range(LINES):
        print("line", number)
    mark("empty lines and tabs")
    print("\n\n\ta\t\n  b  ")
    mark("os.write, a subprocess and print in order")
    print("first")
    os.write(1, b"second\n")
    subprocess.run(["/bin/echo", "third"], check=True)
    mark("ANSI colors")
    print("\033[31mred\033[0m")
    mark("the end")
    for number in range(LINES // 10):
        print("error", number, file=sys.stderr)
    grandchild = subprocess.Popen(
        ["/bin/sleep", "300"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    facts.FACTS["grandchild"] = grandchild.pid
    fork = multiprocessing.get_context("fork")
    in_threads_exit, in_atexit, never = threading.Event(), fork.Event(), threading.Event()
    fork.Process(target=work, args=("a child process is joined", in_atexit)).start()
    threading.Thread(target=work, args=("a thread is joined", in_threads_exit)).start()
    threading.Thread(target=work, args=("a daemon thread is joined", never), daemon=True).start()
    threading._register_atexit(in_threads_exit.set)
    threading._register_atexit(print, "threading._register_atexit", flush=True)
    atexit.register(in_atexit.set)
    atexit.register(print, "atexit, last", flush=True)
    atexit.register(print, "atexit, first", flush=True)
    facts.save()
    print("no final newline", end="")
    sys.exit(None)
