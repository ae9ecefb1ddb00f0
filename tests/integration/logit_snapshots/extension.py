"""The syrupy extension: one JSON file a test, compared within a tolerance, its diff a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syrupy.extensions.json import JSONSnapshotExtension

from .comparison import Beyond, compare, table
from .record import from_text, to_text
from .tolerance import allowed_in

UPDATE = "run this test with --snapshot-update, and look at the new file before you commit it"


class LogitSnapshotExtension(JSONSnapshotExtension):
    """Serializes a `LogitRecord`.

    syrupy writes a file only where `matches` is false, so `--snapshot-update` leaves alone what is within tolerance.
    """

    def serialize(self, data: Any, **_: Any) -> str:
        return to_text(data)

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        return not differences(snapshot_data, serialized_data)

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        if snapshot_data:
            yield from table(differences(snapshot_data, serialized_data))
        yield f"If this is what it should be, {UPDATE}."

    def delete_snapshots(self, *, snapshot_location: str, snapshot_names: set[str]) -> None:
        """The test that looks for orphans may have been first."""
        Path(snapshot_location).unlink(missing_ok=True)


def differences(was: str, now: str) -> list[Beyond]:
    """What is beyond the tolerance between two texts of records.

    A text that is no record differs, and is no exception: syrupy would not replace it then.
    """
    record = from_text(now)
    try:
        snapshot = from_text(was)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [Beyond("", "the file", f"{type(error).__name__}: {error}", "a record", "a record")]
    return compare(snapshot, record, allowed_in(f"{record.scheme}-{record.dtype}"))
