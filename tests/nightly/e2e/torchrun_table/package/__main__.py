"""The same as end.py, as a package, a folder and a zip file."""

import sys

import facts

facts.start(globals())
print("the script runs")
if sys.argv[-1] == "os._exit":
    import os

    os._exit(5)
sys.exit(int(sys.argv[-1]))
