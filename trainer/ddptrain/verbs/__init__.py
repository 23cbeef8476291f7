"""What ddptrain does besides training: one file a verb, each with a ``main`` from arguments to an exit code."""

VERBS = ("export", "fit")
