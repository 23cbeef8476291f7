"""``python -m ddprun.run_path SCRIPT ...`` runs the script with runpy, as torchrun's --run-path does.

runpy does not add the script's folder to ``sys.path``. SCRIPT may also be a folder or a zip file with a __main__.py.
"""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
