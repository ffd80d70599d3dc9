"""`gpu-plugin`, and `python -m gpu_plugin`."""

import sys


def main() -> int:
    """Runs the command line. An interrupt ends it without a word, however early it comes."""
    try:
        from gpu_plugin import cli  # noqa: PLC0415 - most of the time before there is anything to interrupt

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
