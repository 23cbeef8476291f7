"""An argparse parser that reports an error in one line and suggests the nearest option. It defines no options."""

import argparse
import difflib
from typing import NoReturn

from ddpwire.exits import Exit

UNKNOWN = "unrecognized arguments: "  # argparse's own message


class Parser(argparse.ArgumentParser):
    """A parser without the usage text that argparse prints before an error."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(Exit.USAGE, f"{self.prog}: {self.with_suggestion(message)}; see {self.prog} --help\n")

    def with_suggestion(self, message: str) -> str:
        """Return the message. If it is about an unknown option, add the known option that is most similar."""
        word = message.removeprefix(UNKNOWN).split()[0].partition("=")[0] if message.startswith(UNKNOWN) else ""
        if not word.startswith("--"):
            return message
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        near = [flag for flag in known if flag.startswith(word)] or difflib.get_close_matches(word, known, n=1)
        return f"{message} (did you mean {near[0]}?)" if near else message
