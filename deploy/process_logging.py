"""How a process of the cluster logs: lines for people or JSON for programs, on standard error, which Ray keeps."""

import json
import logging
import sys
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")
OUR_LOGGERS = ("baton", "engine", "kv_transfer", "worker", "prefill_worker", "decode_worker", "router", "deploy")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339), level, member, logger, message, and the traceback if there is one."""

    def __init__(self, member: str) -> None:
        super().__init__()
        self._member = member

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "member": self._member,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(member: str, log_format: str) -> None:
    """Our own loggers from INFO on, those of libraries from WARNING on. For entry points of processes."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {member} %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(member) if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
