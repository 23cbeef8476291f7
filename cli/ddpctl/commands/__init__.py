"""The subcommands of ddpctl."""
