"""The console script and ``python -m ddpctl``. It imports almost nothing before the Ctrl-C handler is installed."""

from ddpctl.execution import interrupts


def main() -> None:
    """Run ddpctl."""
    interrupts.exit_silently()
    from ddpctl.main import main as run

    run()


if __name__ == "__main__":
    main()
