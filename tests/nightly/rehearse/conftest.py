"""The fixtures of tests/e2e: each test has the system's programs, and fails if a process is left."""

from tests.e2e.conftest import nothing_left, real_programs  # noqa: F401
