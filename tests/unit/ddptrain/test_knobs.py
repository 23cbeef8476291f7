"""Options that change how a step is taken, not what it learns: each trains, and ends where it should."""

TINY = (
    "--data=synthetic",
    "--synthetic-samples=256",
    "--synthetic-shape=3x16x16",
    "--batch-size=32",
    "--epochs=2",
    "--lr=0.02",
)
