"""A rank that says something and fails as a script does."""

print("epoch 1 of 3")
raise ValueError("bad label 17")
