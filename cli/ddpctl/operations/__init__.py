"""What the verbs of ddpctl do, step by step."""
