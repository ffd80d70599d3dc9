"""Log lines on standard error: text for people, JSON for collectors."""

import logging
import sys

TEXT = "%(asctime)s %(levelname)-7s %(message)s"
JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"

# These libraries tell of every request and connection at INFO, which is our debugging.
_CHATTY = ("grpclib", "asyncio", "hpack", "h2", "httpx", "httpcore", "httpx2", "httpcore2")


def configure(form: str, level: str) -> None:
    """Sends log lines of `level` (debug, info, warning, error) and above to standard error as `form`, text or json."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - paid for only by those who ask for it

        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(JSON, rename_fields=names, datefmt="%Y-%m-%dT%H:%M:%S%z"))
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING if number > logging.DEBUG else logging.INFO))
