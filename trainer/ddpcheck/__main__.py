"""``python -m ddpcheck bench|doctor``: one rank of a check, which ddprun or torchrun starts like a training script."""

import argparse
import json
from importlib import import_module

from ddpwire.log_record import pack_result


def main() -> None:
    """Run one check. Rank 0 prints the result as JSON or, with ``--record``, as lines that ddpctl reads."""
    parser = argparse.ArgumentParser(prog="ddpcheck", description=__doc__)
    parser.add_argument("check", choices=("bench", "doctor"))
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], help="bytes, as 4096,65536"
    )
    parser.add_argument("--advise", action="store_true", help="also measure the all-reduces of ddptrain's model")
    parser.add_argument("--record", action="store_true", help="print the result for programs")
    options = parser.parse_args()
    if result := import_module(f"ddpcheck.{options.check}").main(options):
        result = {"check": options.check, **result}
        print(*(pack_result(result) if options.record else [json.dumps(result, indent=1)]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
