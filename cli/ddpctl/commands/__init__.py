"""The subcommands of ddpctl, with one file for each group of them."""
