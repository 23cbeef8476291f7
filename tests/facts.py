"""What a message must name, whatever its words are."""


def assert_names(message: object, *facts: object) -> None:
    """Check that a message has each of these facts: hosts, paths, options, variables, numbers."""
    text = str(message)
    missing = [str(fact) for fact in facts if str(fact) not in text]
    assert not missing, f"{missing} not in {text!r}"
