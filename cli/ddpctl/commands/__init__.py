"""The subcommands of ddpctl. Each module has a group of related subcommands."""
