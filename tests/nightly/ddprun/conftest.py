"""The breadth of ddprun, ddpwire and ddpcheck: other rows of daily tables, and ranks with torch."""

from tests.fixtures.nodes import runs as runs
