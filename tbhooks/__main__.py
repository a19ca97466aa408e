"""`python -m tbhooks`, and the `tbhooks` command. A script that is run finds nothing loaded that it has not loaded."""

import sys


def main() -> int:
    """What was asked for; returns the exit code."""
    if sys.argv[1:2] == ["run"]:
        from tbhooks import running  # noqa: PLC0415

        return running.main(sys.argv[2:])
    from tbhooks import cli  # noqa: PLC0415

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
