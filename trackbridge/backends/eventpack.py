"""Records as TensorBoard's `Event` messages, with the protos that the tensorboard package brings."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.backends import words
from trackbridge.backends.eventfile import records
from trackbridge.records import Row, Schema

SEQ_TAG = "trackbridge__seq__"
_LAYOUT_TAG = "custom_scalars__config__"
_DT_STRING, _DT_INT64 = 7, 9
_FLOAT = 4

# category -> chart title -> regular expressions of tags
_LAYOUT = {
    "trackbridge": {
        "loss": [r"train/loss$"],
        "gradient norm": [r"grad/norm(_clipped)?$"],
        "learning rate": [r"train/lr"],
        "anomalies": [r"anomaly/"],
        "activation kurtosis": [r"act/.*/kurtosis$"],
    }
}


class Packer:
    """Records as serialised `Event` messages.

    A row is packed by template: with a schema's tags fixed, only the float32 of each value changes, always at the same
    offset, so a row of 1,000 values costs microseconds instead of 1,000 protobuf objects.
    """

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._templates: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}

    def header(self, created: float) -> list[bytes]:
        """The first events of every file: the format's version and the custom-scalars layout."""
        version = self._event(wall_time=created, file_version="brain.Event:2")
        layout = self._tensor_value(_LAYOUT_TAG, _layout(), "custom_scalars")
        return [
            version.SerializeToString(),
            self._event(wall_time=created, summary=self._summary(value=[layout])).SerializeToString(),
        ]

    def start(self, step: int, when: float) -> bytes:
        """SessionLog START: what came before with this step or a later one is replaced."""
        log = self._session(status=self._session.START)
        return bytes(self._event(wall_time=when, step=step, session_log=log).SerializeToString())

    def row(self, row: Row) -> bytes:
        template, offsets = self._template(row.schema)
        body = template.copy()
        with np.errstate(over="ignore"):
            values = row.values.astype("<f4")
        body[offsets] = values.view(np.uint8).reshape(-1, _FLOAT)
        # one message cut in two is one message: protobuf joins the repeated values of both
        seq = self._summary(value=[self._seq_value(row.seq)])
        head = self._event(wall_time=row.time, step=row.step, summary=seq).SerializeToString()
        return bytes(head + b"\x2a" + _varint(body.size) + body.tobytes())

    def text(self, tag: str, markdown: str, *, step: int, time: float, seq: int) -> bytes:
        values = [self._seq_value(seq), self._tensor_value(tag, markdown.encode(), "text")]
        return bytes(self._event(wall_time=time, step=step, summary=self._summary(value=values)).SerializeToString())

    def last(self, path: Path) -> tuple[int, str | None, str]:
        """Of the last record in `path` that a reader can see: its seq (the highest in the file; -1 if there is no record), and
        the tag and content when it is a text."""
        data = deque(records(path), maxlen=1)
        values = self._event.FromString(data[0]).summary.value if data else ()
        if not values or values[0].tag != SEQ_TAG:
            return -1, None, ""
        text = values[1] if len(values) == 2 and values[1].tensor.string_val else None
        content = text.tensor.string_val[0].decode() if text else ""
        return int(values[0].tensor.int64_val[0]), text.tag if text else None, content

    def _template(self, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
        found = self._templates.get(schema.names)
        if found is None:
            body, ends = bytearray(), []
            for name in schema.names:
                value = self._summary.Value(tag=words.storable(name), simple_value=1.0).SerializeToString()
                body += b"\x0a" + _varint(len(value)) + value
                ends.append(len(body))
            offsets = np.array(ends, np.intp).reshape(-1, 1) - _FLOAT + np.arange(_FLOAT)
            found = self._templates[schema.names] = np.frombuffer(bytes(body), np.uint8), offsets
        return found

    def _seq_value(self, seq: int) -> Any:
        value = self._tensor_value(SEQ_TAG, b"", "trackbridge")
        value.tensor.dtype = _DT_INT64
        del value.tensor.string_val[:]
        value.tensor.int64_val.append(seq)
        return value

    def _tensor_value(self, tag: str, content: bytes, plugin: str) -> Any:
        value = self._summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = plugin
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.SetInParent()  # a scalar
        value.tensor.string_val.append(content)
        return value


def _layout() -> bytes:
    from tensorboard.plugins.custom_scalar import layout_pb2 as pb

    def chart(title: str, tags: list[str]) -> Any:
        return pb.Chart(title=title, multiline=pb.MultilineChartContent(tag=tags))

    categories = [
        pb.Category(title=category, chart=[chart(title, tags) for title, tags in charts.items()])
        for category, charts in _LAYOUT.items()
    ]
    return bytes(pb.Layout(category=categories).SerializeToString())


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append((number & 0x7F) | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
