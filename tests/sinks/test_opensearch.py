"""OpenSearch as a sink, beyond what every target does (`test_sinks.py`): versions, an index of one's own, a server that is busy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headwater.model.backoff import Backoff
from headwater.model.errors import CheckpointConflict, Fenced, InvalidInput, NoAccess, Unreachable
from headwater.sinks.opensearch_client import RETRY_S, Action, OpenSearchClient
from headwater.sinks.sink import Dead, open_sink
from tests.rigs.app.sink_targets import SHAPE, Target, batch, folded, marker, write

Make = Callable[[str], Target]


def user(n: int, **more: Any) -> dict[str, Any]:
    return {"name": f"u{n}", "n": n, "amount": n / 4, **more}


@pytest.mark.service("opensearch")
def test_a_writer_that_is_overtaken_inside_a_batch_leaves_nothing_older(make_target: Make) -> None:
    """Each document has the version of its batch: what an overtaken writer sends late is refused by the server itself, a removal too."""
    target = make_target("opensearch")
    zombie, sink = target.sink(), target.sink()
    zombie.open(SHAPE)
    write(zombie, 0, batch([("b", user(1))]), end=1)
    assert zombie.begin(marker(1, 3))
    sink.open(SHAPE)
    table = batch([("a", user(2)), ("b", None)], first=1)
    write(sink, 1, table, end=3)
    with pytest.raises(Fenced):
        zombie.upsert(batch([("b", user(9))]).select(SHAPE.schema.names))
    with pytest.raises(Fenced):
        zombie.delete(batch([("a", None)]).select(["id"]))
    with pytest.raises(Fenced):
        zombie.commit(marker(1, 3))
    assert target.rows() == folded([("a", user(2))])


@pytest.mark.service("opensearch")
def test_an_index_that_was_removed_or_made_anew_is_noticed(make_target: Make) -> None:
    """The ledger is elsewhere, and knows the index by its own id: nothing goes on into an index that lacks what was before."""
    target = make_target("opensearch")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1))]))
    sink.client.ask("DELETE", "/users")
    with pytest.raises(CheckpointConflict, match="emptied"):
        write(sink, 1, batch([("b", user(2))], first=1))
    again = target.sink()
    again.open(SHAPE)
    with pytest.raises(CheckpointConflict, match="emptied"):
        write(again, 1, batch([("b", user(2))], first=1))
    write(again, 0, batch([("a", user(1))]))
    assert target.rows() == folded([("a", user(1))])


@pytest.mark.service("opensearch")
def test_rows_that_an_index_of_ones_own_refuses_are_dead_letters(make_target: Make) -> None:
    """With the server's reason; the rest of the batch goes in, and the key keeps what it had. Columns that it lacks are added."""
    target = make_target("opensearch")
    sink = target.sink()
    mapping = {"dynamic": "strict", "properties": {"id": {"type": "keyword"}, "name": {"type": "ip"}}}
    sink.client.ask("PUT", "/users", {"mappings": mapping})
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1, name="10.0.0.1")), ("b", user(2, name="10.0.0.2"))]))
    dead: list[Dead] = []
    rows = [("a", user(3, name="no address")), ("b", user(4, name="10.0.0.4")), ("c", user(5, name="nor this"))]
    written = write(sink, 1, batch(rows, first=2), dead=dead)
    assert (written.upserts, written.dead) == (1, 2)
    assert [one.offset for one in dead] == [2, 4]
    assert "not an IP string literal" in dead[0].error
    assert target.rows() == folded([("a", user(1, name="10.0.0.1")), ("b", user(4, name="10.0.0.4"))])


@pytest.mark.service("opensearch")
def test_words_are_found_and_numbers_compared(make_target: Make) -> None:
    target = make_target("opensearch")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1, name="a red bicycle")), ("b", user(2, name="a green lamp"))]))
    sink.client.ask("POST", "/users/_refresh")
    for query in (
        {"match": {"name": "Bicycle"}},
        {"range": {"n": {"lt": 2}}},
        {"term": {"name.keyword": "a red bicycle"}},
    ):
        hits = sink.client.ask("POST", "/users/_search", {"query": query}).body["hits"]["hits"]
        assert [hit["_id"] for hit in hits] == ["a"], query


# A server that is busy, refuses or is not there: loopback HTTP that answers as it is told


@contextmanager
def answering(answers: list[tuple[int, Any]]) -> Iterator[tuple[OpenSearchClient, list[tuple[str, str]], list[float]]]:
    """A client of a server that gives these answers, one after the other; what it was asked, and how long was waited."""
    asked, waited = list[tuple[str, str]](), list[float]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            asked.append((self.path, body))
            status, answer = answers[min(len(asked), len(answers)) - 1]
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    client = OpenSearchClient(
        f"http://me:pw@127.0.0.1:{server.server_port}",
        shown="opensearch://x/y",
        backoff=lambda: Backoff(*RETRY_S, jitter=0.0, sleep=waited.append),
    )
    try:
        yield client, asked, waited
    finally:
        client.close()
        server.shutdown()
        thread.join()
        server.server_close()


def item(status: int, error: str | None = None) -> dict[str, Any]:
    return {"index": {"status": status, **({"error": {"type": "t", "reason": error}} if error else {})}}


def test_only_what_the_server_had_no_room_for_is_sent_again() -> None:
    """With growing pauses; what it refuses for good is told once."""
    actions = [Action(f'{{"index":{{"_id":"{n}"}}}}', f'{{"n":{n}}}') for n in range(3)]
    first = {"items": [item(201), item(429, "rejected"), item(400, "no")]}
    refused: list[tuple[int, int, str]] = []
    with answering(
        [(503, {}), (200, first), (200, {"items": [item(429, "rejected")]}), (200, {"items": [item(201)]})]
    ) as (
        client,
        asked,
        waited,
    ):
        client.bulk(actions, lambda *one: refused.append(one))
    assert [body.count("_id") for _, body in asked] == [3, 3, 1, 1]
    assert '"_id":"1"' in asked[-1][1]
    assert refused == [(2, 400, "t: no")]
    assert waited == [0.1, 0.1, 0.2]


@pytest.mark.parametrize(
    ("status", "error"),
    [(503, Unreachable), (429, Unreachable), (500, Unreachable), (401, NoAccess), (400, InvalidInput)],
)
def test_what_a_server_says_decides_whether_a_retry_can_help(status: int, error: type[Exception]) -> None:
    said = {"error": {"type": "some_exception", "reason": "because"}}
    with answering([(status, said)]) as (client, _, _), pytest.raises(error, match="some_exception: because"):
        client.ask("POST", "/_bulk", {})


def test_a_server_that_is_not_there_and_an_address_without_an_index_are_told() -> None:
    sink = open_sink("opensearch://me:secret@127.0.0.1:1/users", stage="s")
    with pytest.raises(Unreachable) as told:
        sink.open(SHAPE)
    assert "secret" not in str(told.value)
    with pytest.raises(InvalidInput, match="has no index"):
        open_sink("opensearch://localhost:9200", stage="s")
