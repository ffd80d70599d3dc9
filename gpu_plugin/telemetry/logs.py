"""Log lines on standard error: text for people, or JSON for collectors. Times are UTC. Logging never blocks the event loop.

The objects of a message are fields in logging's `extra`: `log.warning("...", extra={"resource": name})`. JSON lines have these
fields next to the message. Text lines do not, since the message has the same content. docs/command-line.md lists the fields. If
there is a `uuid` of a known GPU, the GPU's `index` and `bus_id` are added.
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

# grpclib's server logs each request that a peer cancels, and peers can do that without limit.
_LOGGING_PEER_CANCELS = "grpclib.server"

# These libraries log each request and connection at INFO. Show these lines only at level debug.
_CHATTY = ("grpclib", "asyncio", "hpack", "h2", "httpx", "httpcore", "httpx2", "httpcore2")


_gpus: Mapping[str, tuple[int, str]] = {}  # index and PCI bus id of GPUs, by uuid

_writer: LogWriter | None = None
_stream: object = None  # the stream of the writer


class _Queued(logging.Handler):
    """Formats a record at once, and passes it to the thread of a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a formatting error must not fail the code that logs
            self.handleError(record)
        else:
            self._writer.put(line)

    def flush(self) -> None:
        """Wait a moment until all lines are written. The logging module calls it when the process ends."""
        self._writer.flush()


class TextFormatter(logging.Formatter):
    """`2026-11-22T02:40:13.123Z LEVEL   message`; each message is a single line, a traceback is indented."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Return the time in UTC."""
        return rfc3339_milliseconds(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line with control characters replaced, since peers may have put some into it."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Return the traceback, indented so that no line of it looks like a log line."""
        trace = super().formatException(ei)  # type: ignore[arg-type] # as logging's own
        return "\n".join(f"    {printable(line)}" for line in trace.split("\n"))


def configure(form: str, level: str) -> None:
    """Write log lines of `level` (debug, info, warning, error) and above to standard error as `form`: text or json."""
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = _Queued(_standard_error())
    handler.addFilter(_with_gpu)
    handler.setFormatter(_json() if form == "json" else TextFormatter())
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING if number > logging.DEBUG else logging.INFO))
    logging.getLogger(_LOGGING_PEER_CANCELS).setLevel(max(number, logging.WARNING))


def know(gpus: "Iterable[Gpu]") -> None:
    """Store the index and PCI bus id of GPUs, which are added as fields to lines with a uuid from now on."""
    global _gpus  # noqa: PLW0603 - one for the process, as the root logger
    _gpus = {gpu.uuid: (gpu.index, short_bus_id(gpu.pci_bus_id)) for gpu in gpus}


def _with_gpu(record: logging.LogRecord) -> bool:
    """Add index and bus id to a record that has the uuid of a GPU."""
    uuid = str(getattr(record, "uuid", ""))
    if uuid in _gpus and not hasattr(record, "index"):
        record.index, record.bus_id = _gpus[uuid]
    return True


def dropped() -> int:
    """Return the number of lines that could not be written since the start."""
    return 0 if _writer is None else _writer.dropped


def _json() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - imported only if it is used

    class InUtc(JsonFormatter):
        def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
            return rfc3339_milliseconds(record.created)

        def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
            return {key: encodable(value) if isinstance(value, str) else value for key, value in log_data.items()}

    return InUtc(JSON, rename_fields={"asctime": "time", "levelname": "level", "name": "logger"})


def _standard_error() -> LogWriter:
    """Return this process's writer. Make a new writer if sys.stderr has been replaced, as in tests."""
    global _writer, _stream  # noqa: PLW0603 - one for the process, as the root logger
    if _writer is None or _stream is not sys.stderr:
        _stream = sys.stderr
        _writer = LogWriter(_writing_to(sys.stderr), _dropped_line)
    return _writer


def _writing_to(stream: TextIO) -> Callable[[bytes], None]:
    try:
        return to_descriptor(stream.fileno())
    except (AttributeError, OSError):  # sys.stderr was replaced by an object without a descriptor

        def write(content: bytes) -> None:
            stream.write(content.decode())
            stream.flush()

        return write


def _dropped_line(count: int) -> str:
    words = f"{counted(count, 'log line')} {'was' if count == 1 else 'were'} dropped: they could not be written to standard error"
    record = logging.LogRecord(__name__, logging.WARNING, "", 0, words, None, None)
    return next((handler.format(record) for handler in logging.root.handlers if isinstance(handler, _Queued)), words)
