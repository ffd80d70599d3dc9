"""Log lines on standard error: text for people, JSON for collectors. In UTC, a line each, and never in the way of the event loop.

What a line is about goes along as fields, by logging's `extra`: `log.warning("...", extra={"resource": name})`. JSON lines
have them beside the message; text lines do not need them, since the message says as much. docs/command-line.md has those there
are; to a `uuid`, the GPU's `index` and `bus_id` are added where they are known.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from gpu_plugin.config.times import rfc3339_milliseconds
from gpu_plugin.config.words import counted
from gpu_plugin.devices.gpu_names import short_bus_id
from gpu_plugin.runtime.printable import encodable, printable
from gpu_plugin.telemetry.log_writer import LogWriter, to_descriptor

if TYPE_CHECKING:
    from gpu_plugin.devices.node import Gpu

TEXT = "%(asctime)s %(levelname)-7s %(message)s"
JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"

# grpclib's server has a line for each request that a peer gives up, which a peer may do at will.
_AT_WILL = "grpclib.server"

# These libraries tell of every request and connection at INFO, which is our debugging.
_CHATTY = ("grpclib", "asyncio", "hpack", "h2", "httpx", "httpcore", "httpx2", "httpcore2")


_gpus: Mapping[str, tuple[int, str]] = {}
"""Index and PCI bus id of GPUs, by uuid."""

_writer: LogWriter | None = None
_stream: object = None
"""What the writer writes to."""


class _Queued(logging.Handler):
    """Formats a record at once, and has it written by the thread of a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a line that cannot be made is no reason to fail what it tells of
            self.handleError(record)
        else:
            self._writer.put(line)

    def flush(self) -> None:
        """Waits a moment until all is written: logging does so when the process ends."""
        self._writer.flush()


class TextFormatter(logging.Formatter):
    """`2026-11-22T02:40:13.123Z LEVEL   message`; a message is one line whatever it was given, a trace is indented."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """The time in UTC."""
        return rfc3339_milliseconds(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with what a peer may have put into it shown and not obeyed."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        """The trace, indented: no line of it can be taken for one of the log."""
        trace = super().formatException(ei)  # type: ignore[arg-type] # as logging's own
        return "\n".join(f"    {printable(line)}" for line in trace.split("\n"))


def configure(form: str, level: str) -> None:
    """Sends log lines of `level` (debug, info, warning, error) and above to standard error as `form`, text or json."""
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = _Queued(_standard_error())
    handler.addFilter(_with_gpu)
    handler.setFormatter(_json() if form == "json" else TextFormatter())
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING if number > logging.DEBUG else logging.INFO))
    logging.getLogger(_AT_WILL).setLevel(max(number, logging.WARNING))


def know(gpus: "Iterable[Gpu]") -> None:
    """Takes which index and PCI bus id GPUs have: lines about a uuid have them as fields from now on."""
    global _gpus  # noqa: PLW0603 - as the root logger, there is one
    _gpus = {gpu.uuid: (gpu.index, short_bus_id(gpu.pci_bus_id)) for gpu in gpus}


def _with_gpu(record: logging.LogRecord) -> bool:
    """Adds index and bus id to a record that has the uuid of a GPU."""
    uuid = str(getattr(record, "uuid", ""))
    if uuid in _gpus and not hasattr(record, "index"):
        record.index, record.bus_id = _gpus[uuid]
    return True


def dropped() -> int:
    """How many lines could not be written since the start."""
    return 0 if _writer is None else _writer.dropped


def _json() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - paid for only by those who ask for it

    class InUtc(JsonFormatter):
        def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
            return rfc3339_milliseconds(record.created)

        def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
            return {key: encodable(value) if isinstance(value, str) else value for key, value in log_data.items()}

    return InUtc(JSON, rename_fields={"asctime": "time", "levelname": "level", "name": "logger"})


def _standard_error() -> LogWriter:
    """The one writer of this process; another one where standard error is another stream by now, as under a test."""
    global _writer, _stream  # noqa: PLW0603 - as the root logger, there is one
    if _writer is None or _stream is not sys.stderr:
        _stream = sys.stderr
        _writer = LogWriter(_writes(sys.stderr), _dropped_line)
    return _writer


def _writes(stream: TextIO) -> Callable[[bytes], None]:
    try:
        return to_descriptor(stream.fileno())
    except (AttributeError, OSError):  # something that stands in for standard error and is no file

        def write(content: bytes) -> None:
            stream.write(content.decode())
            stream.flush()

        return write


def _dropped_line(count: int) -> str:
    words = f"{counted(count, 'log line')} {'was' if count == 1 else 'were'} dropped: standard error did not take them"
    record = logging.LogRecord(__name__, logging.WARNING, "", 0, words, None, None)
    return next((handler.format(record) for handler in logging.root.handlers if isinstance(handler, _Queued)), words)
