"""ddprun against stand-ins of launchers, with ranks that import no torch."""

from tests.fixtures.nodes import runs as runs
