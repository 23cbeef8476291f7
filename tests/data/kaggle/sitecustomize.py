"""On PYTHONPATH of a test's ranks: torchvision compares CIFAR's files with the checksums of the real ones, and a test's
are synthetic. All else of its reader runs as it is.
"""

import importlib.abc
import importlib.machinery
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Lets torchvision.datasets.cifar believe that a file is whole."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision.datasets.cifar":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.check_integrity = lambda *_: True

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
