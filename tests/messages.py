"""What a message must name, whatever its words are."""

import re


def assert_names(message: object, *facts: object) -> None:
    """Check that a message has each of these facts as a whole: hosts, paths, options, variables, numbers."""
    text = str(message)
    missing = [fact for fact in map(str, facts) if not re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text)]
    assert not missing, f"{missing} not in {text!r}"
