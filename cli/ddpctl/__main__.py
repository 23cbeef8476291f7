"""The console script and ``python -m ddpctl``. Imports almost nothing before the handler of Ctrl-C is set."""

from ddpctl import interrupts


def main() -> None:
    """Run ddpctl."""
    interrupts.exit_silently()
    from ddpctl.main import main as run

    run()


if __name__ == "__main__":
    main()
