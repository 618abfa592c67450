"""Quantities as text: events, bytes, durations."""

from __future__ import annotations


def events_text(count: int) -> str:
    """A number of events, such as `3 events`."""
    return f"{count:,} event{'' if count == 1 else 's'}"


def bytes_text(count: int) -> str:
    """A number of bytes, such as `1.5 MB`."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """A duration, such as `5 min`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
