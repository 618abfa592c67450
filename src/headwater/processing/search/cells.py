"""Cells: the map in squares, by which coordinates find the circles and boxes that may hold them.

A level divides latitudes and longitudes into 2^level parts each. A shape has the level on which it is about as large as a cell, so a few
cells cover it. The earth is a ball of 6,371,008.8 m radius.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headwater.processing.search.query import Box, Circle

EARTH_M = 6_371_008.8
LEVEL_MAX = 20
_SLACK = 1e-9
"""Degrees by which a cover is wider than its shape: what computing may be wrong by."""

_Array = Any
"""A NumPy array."""


class Shapes(NamedTuple):
    """Circles and boxes: each has limits in degrees, a circle also its centre and distance (of a box this is infinite)."""

    code: _Array
    south: _Array
    west: _Array
    north: _Array
    east: _Array
    latitude: _Array
    longitude: _Array
    distance_m: _Array

    @classmethod
    def of(cls, places: Sequence[tuple[int, Circle | Box]]) -> Shapes:
        """The shapes of some fields."""
        rows = [(code, *_limits(shape)) for code, shape in places]
        return cls(*np.array(rows, np.float64).reshape(-1, len(cls._fields)).T)

    def hold(self, number: _Array, latitude: _Array, longitude: _Array) -> _Array:
        """Whether shapes hold coordinates; NaN is nowhere."""
        with np.errstate(invalid="ignore"):
            west, east, is_circle = self.west[number], self.east[number], np.isfinite(self.distance_m[number])
            inside = (latitude >= self.south[number]) & (latitude <= self.north[number])
            inside &= np.where(
                west <= east, (longitude >= west) & (longitude <= east), (longitude >= west) | (longitude <= east)
            )
            away = distances_m(latitude, longitude, self.latitude[number], self.longitude[number])
            return np.where(is_circle, away <= self.distance_m[number], inside)


def distances_m(latitude: _Array, longitude: _Array, to_latitude: _Array, to_longitude: _Array) -> _Array:
    """The way between coordinates over the ball (haversine)."""
    first, second = np.radians(latitude), np.radians(to_latitude)
    half = np.sin((second - first) / 2) ** 2
    half = half + np.cos(first) * np.cos(second) * np.sin(np.radians(to_longitude - longitude) / 2) ** 2
    return 2 * EARTH_M * np.arcsin(np.sqrt(np.clip(half, 0, 1)))


def _limits(shape: Circle | Box) -> tuple[float, ...]:
    if isinstance(shape, Box):
        return shape.south, shape.west, shape.north, shape.east, 0.0, 0.0, np.inf
    angle = shape.distance_m / EARTH_M
    reach = float(np.degrees(angle)) + _SLACK
    south, north = shape.latitude - reach, shape.latitude + reach
    west, east = -180.0, 180.0
    if south > -90 and north < 90:
        wide = float(np.degrees(np.arcsin(min(1.0, np.sin(angle) / np.cos(np.radians(shape.latitude)))))) + _SLACK
        west, east = _around(shape.longitude - wide), _around(shape.longitude + wide)
    return max(south, -90.0), west, min(north, 90.0), east, shape.latitude, shape.longitude, shape.distance_m


def _around(longitude: float) -> float:
    return longitude + 360 if longitude < -180 else longitude - 360 if longitude > 180 else longitude


def cover(shapes: Shapes) -> tuple[_Array, _Array, _Array]:
    """The cells of shapes: for each the shape's number, the level, and the cell's key."""
    wide = np.where(shapes.west <= shapes.east, shapes.east - shapes.west, shapes.east - shapes.west + 360) + 4 * _SLACK
    high = shapes.north - shapes.south + 4 * _SLACK
    level = np.clip(np.floor(np.log2(np.minimum(180 / high, 360 / wide))), 0, LEVEL_MAX).astype(np.int64)
    parts = 1 << level
    bottom, top = (_part(edge, 90, 180, parts) for edge in (shapes.south - _SLACK, shapes.north + _SLACK))
    left = np.floor((shapes.west - _SLACK + 180) / 360 * parts).astype(np.int64)
    right = np.floor((shapes.west + wide + _SLACK + 180) / 360 * parts).astype(np.int64)
    columns = np.minimum(right - left + 1, parts)
    count = columns * (top - bottom + 1)
    number = np.repeat(np.arange(len(count)), count)
    at = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    x = (left[number] + at % columns[number]) % parts[number]
    y = bottom[number] + at // columns[number]
    return number, level[number], _key(shapes.code[number].astype(np.int64), level[number], x, y)


def cells_of(code: int, level: int, latitude: _Array, longitude: _Array) -> _Array:
    """The keys of the cells that hold coordinates, which must be on the earth."""
    parts = np.full(len(latitude), 1 << level)
    x = np.floor((longitude + 180) / 360 * parts).astype(np.int64) % parts
    return _key(np.full(len(x), code), np.full(len(x), level), x, _part(latitude, 90, 180, parts))


def _part(degrees: _Array, above: float, whole: float, parts: _Array) -> _Array:
    return np.clip(np.floor((degrees + above) / whole * parts).astype(np.int64), 0, parts - 1)


def _key(code: _Array, level: _Array, x: _Array, y: _Array) -> _Array:
    """Field, level, row and column as one number."""
    return ((code * (LEVEL_MAX + 1) + level) << (2 * LEVEL_MAX + 2)) | (y << (LEVEL_MAX + 1)) | x
