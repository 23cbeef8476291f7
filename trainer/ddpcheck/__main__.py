"""``python -m ddpcheck bench|doctor``: one rank of a check, started as a training script is, by ddprun or torchrun."""

import argparse
from importlib import import_module

CHECKS = {"bench": "ddpcheck.bench", "doctor": "ddpcheck.doctor"}  # a module with add_options(parser) and main(options)


def main() -> None:
    """Parse the command line and run one check."""
    parser = argparse.ArgumentParser(prog="ddpcheck", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True, metavar="CHECK")
    for name, module in CHECKS.items():
        check = checks.add_parser(name)
        check.add_argument("--record", action="store_true", help="also print the result for programs (ddpctl)")
        import_module(module).add_options(check)
    options = parser.parse_args()
    import_module(CHECKS[options.check]).main(options)


if __name__ == "__main__":
    main()
