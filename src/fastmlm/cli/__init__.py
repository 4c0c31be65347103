"""The ``fastmlm`` command. What needs transformers is imported once the arguments are parsed: ``--help`` is quick."""

import sys
from collections.abc import Sequence

from fastmlm.cli.arguments import parse
from fastmlm.cli.errors import CliError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    try:
        args = parse(argv)
        if args.command == "pretrain":
            from fastmlm.cli.pretrain import pretrain

            pretrain(args)
        elif args.command == "compare":
            from fastmlm.cli.compare.command import compare

            compare(args)
        else:
            from fastmlm.cli.inspect import inspect

            inspect(args)
    except CliError as error:
        print(f"fastmlm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fastmlm: interrupted", file=sys.stderr)
        return 130
    return 0
