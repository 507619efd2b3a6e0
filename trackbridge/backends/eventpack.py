"""Records as TensorBoard's `Event` messages, with the protos that the tensorboard package brings."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.backends.eventfile import records
from trackbridge.backends.tensorboard_layout import layout
from trackbridge.histograms import EDGES, NONFINITE
from trackbridge.records import Histograms, Row, Schema
from trackbridge.rundir import storable

SEQ_TAG = "trackbridge__seq__"
_LAYOUT_TAG = "custom_scalars__config__"
_DT_FLOAT, _DT_STRING, _DT_INT64 = 1, 7, 9
_FLOAT = 4


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

    def header(self, created: float, series: Collection[str]) -> list[bytes]:
        """The first events of every file: the format's version and the custom-scalars layout for a run with `series`."""
        version = self._event(wall_time=created, file_version="brain.Event:2")
        value = self._tensor_value(_LAYOUT_TAG, layout(series), "custom_scalars")
        return [
            version.SerializeToString(),
            self._event(wall_time=created, summary=self._summary(value=[value])).SerializeToString(),
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
        return self._pack([self._tensor_value(tag, markdown.encode(), "text")], step=step, time=time, seq=seq)

    def shown(self, texts: Mapping[str, str], images: Mapping[str, bytes], *, step: int, time: float, seq: int) -> bytes:
        """Several texts (Markdown) and images (PNG) by tag as one event. Raises `ValueError` for an image that is no PNG."""
        values = [self._tensor_value(tag, markdown.encode(), "text") for tag, markdown in texts.items()]
        return self._pack(
            [*values, *(self._image_value(tag, png) for tag, png in images.items())], step=step, time=time, seq=seq
        )

    def histograms(self, record: Histograms) -> bytes:
        values = [self._histogram_value(name, counts) for name, counts in zip(record.names, record.counts, strict=True)]
        return self._pack(values, step=record.step, time=record.time, seq=record.seq)

    def _pack(self, values: list[Any], *, step: int, time: float, seq: int) -> bytes:
        summary = self._summary(value=[self._seq_value(seq), *values])
        return bytes(self._event(wall_time=time, step=step, summary=summary).SerializeToString())

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
                value = self._summary.Value(tag=storable(name), simple_value=1.0).SerializeToString()
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

    def _image_value(self, tag: str, png: bytes) -> Any:
        """A batch of one image, as the plugin stores it: width, height, and the file."""
        width, height = _size(png)
        value = self._summary.Value(tag=storable(tag))
        value.metadata.plugin_data.plugin_name = "images"
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.dim.add(size=3)
        value.tensor.string_val.extend([str(width).encode(), str(height).encode(), png])
        return value

    def _histogram_value(self, tag: str, counts: np.ndarray) -> Any:
        buckets = _buckets(counts)
        value = self._summary.Value(tag=storable(tag))
        value.metadata.plugin_data.plugin_name = "histograms"
        value.tensor.dtype = _DT_FLOAT
        for size in buckets.shape:
            value.tensor.tensor_shape.dim.add(size=size)
        value.tensor.tensor_content = buckets.astype("<f4").tobytes()
        return value

    def _tensor_value(self, tag: str, content: bytes, plugin: str) -> Any:
        value = self._summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = plugin
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.SetInParent()  # a scalar
        value.tensor.string_val.append(content)
        return value


def _size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG, which stand at a fixed place in it. Raises `ValueError` if it is none."""
    if len(png) < 24 or not png.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("this is not a PNG")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def _buckets(counts: np.ndarray) -> np.ndarray:
    """float32, shape (k, 3): left edge, right edge and count of the columns from the first to the last that is not empty;
    non-finite values have no place on the axis. The outermost columns end where they would if they were as wide as their
    neighbours."""
    edges = np.concatenate(([EDGES[1] * 1.5], EDGES[1:-1], [EDGES[-2] * 1.5]))
    used = np.flatnonzero(counts[:NONFINITE])
    if not used.size:
        return np.zeros((0, 3), np.float32)
    part = slice(int(used[0]), int(used[-1]) + 1)
    return np.stack([edges[:-1][part], edges[1:][part], counts[:NONFINITE][part]], axis=1).astype(np.float32)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append((number & 0x7F) | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
