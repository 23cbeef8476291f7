"""argparse, saying what is wrong in one line, with the nearest of what is allowed. Knows no option."""

import argparse
import difflib
from typing import NoReturn

from ddpwire.exits import Exit

UNKNOWN = "unrecognized arguments: "  # argparse's words


class Parser(argparse.ArgumentParser):
    """A parser without the page of usage that argparse puts before an error."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(Exit.USAGE, f"{self.prog}: {self.with_suggestion(message)}; see {self.prog} --help\n")

    def with_suggestion(self, message: str) -> str:
        """The message, and the option that an unknown one may have meant."""
        word = message.removeprefix(UNKNOWN).split()[0].partition("=")[0] if message.startswith(UNKNOWN) else ""
        if not word.startswith("--"):
            return message
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        near = [flag for flag in known if flag.startswith(word)] or difflib.get_close_matches(word, known, n=1)
        return f"{message} (did you mean {near[0]}?)" if near else message
