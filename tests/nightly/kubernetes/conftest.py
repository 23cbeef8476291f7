"""The fixtures and the scheduler of the tests with real servers."""

from tests.cluster.fixtures import *  # noqa: F403
