"""Appends to a log in a folder, again and again; each append but the first is a round."""

import sys

import sitecustomize

import headwater as hw

APPENDS = 4

with hw.open_log(sys.argv[1]) as log:
    log.create_topic("clicks", "id BIGINT, page STRING, at TIMESTAMP", key="page", time="at")
    rows = [{"id": number, "page": f"/{number % 9}", "at": "2026-01-01T12:00:00Z"} for number in range(100)]
    log.append("clicks", rows)
    for _ in range(APPENDS - 1):
        sitecustomize.begin_round()
        log.append("clicks", rows)
    sitecustomize.begin_round()
