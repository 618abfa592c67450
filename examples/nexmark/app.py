"""Nexmark as one application: all 23 queries over the topics of the auction house, as streams and views.

python -m examples.nexmark.generate --log ./nexmark --events 100000 --shuffled --late 0.01
headwater run examples/nexmark/app.py                    all of them, until Ctrl-C
NEXMARK_QUERIES=q4,q15 headwater run examples/nexmark/app.py --available-now
headwater views sql "select * from q4" --store sqlite:///./nexmark/views.db

What a query only adds to goes to the topic of its name; what it replaces by key is the view of its name.
"""

import os

from ours import QUERIES
from topics import TOPICS

import headwater as hw

LOG = os.environ.get("NEXMARK_LOG", "./nexmark")
LOG_COLUMNS = {"q12": ("_appended",)}


def make(queries=tuple(QUERIES), *, partitions=4):
    """The application with these queries."""
    # Small state, many queries: two tasks each.
    app = hw.App("nexmark", log=LOG, conf={"spark.sql.shuffle.partitions": "2"})
    inputs = {name: app.topic(name, **topic.declared(), partitions=partitions) for name, topic in TOPICS.items()}
    for name in queries:
        if name not in QUERIES:
            raise SystemExit(f"There is no query {name!r}: NEXMARK_QUERIES names some of {', '.join(QUERIES)}.")
        query = QUERIES[name]
        given = [inputs[each] for each in query.inputs]
        columns = LOG_COLUMNS.get(name, ())
        if query.key:
            app.view(*given, name=name, key=query.key, mode=query.mode, log_columns=columns)(query.function)
        else:
            app.stream(*given, to=name, mode=query.mode, log_columns=columns)(query.function)
    return app


chosen = os.environ.get("NEXMARK_QUERIES")
app = make(tuple(chosen.split(",")) if chosen else tuple(QUERIES))

if __name__ == "__main__":
    app.run()
