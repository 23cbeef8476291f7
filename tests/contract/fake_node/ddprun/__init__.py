"""The fake node: a package that stands before the real ddprun. Its nodectl and healthcheck are the real ones."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
