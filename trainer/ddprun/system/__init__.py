"""The machine, and policies without effects."""
