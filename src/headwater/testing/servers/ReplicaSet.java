import de.bwaldvogel.mongo.MongoCollection;
import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.backend.Cursor;
import de.bwaldvogel.mongo.backend.aggregation.Aggregation;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import de.bwaldvogel.mongo.bson.BsonTimestamp;
import de.bwaldvogel.mongo.bson.Document;
import de.bwaldvogel.mongo.exception.MongoServerError;
import de.bwaldvogel.mongo.oplog.Oplog;
import io.netty.channel.Channel;
import java.net.InetSocketAddress;
import java.time.Instant;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * mongo-java-server as a replica set of one: its protocol and its collections, with change streams beside them as MongoDB documents
 * these. The server's own know neither databases nor the key of an updated document, and do not wait.
 *
 * <p>Every command runs alone, so changes are told in the order in which they were made. Arguments: port, then any of {@code
 * standalone} (refuses change streams as a server without a replica set), {@code password} (refuses everybody who has one), {@code
 * preimages} (documents as they were before), {@code entries=N} (how many changes are kept).
 */
public class ReplicaSet extends MemoryBackend {
    private static final long MASK = 0xffffffffL;

    private final int port;
    private final List<String> options;
    private final int entriesMax;
    private final List<Document> entries = new ArrayList<>();
    private final Map<String, Map<Object, Document>> documents = new HashMap<>();
    private final Map<Long, Stream> streams = new HashMap<>();
    private long newest = (Instant.now().getEpochSecond() << 32) + 1;
    private long forgotten = newest;
    private long cursors = 1L << 40;

    public static void main(String[] arguments) {
        List<String> options = List.of(arguments).subList(1, arguments.length);
        ReplicaSet backend = new ReplicaSet(Integer.parseInt(arguments[0]), options);
        backend.enableOplog();
        MongoServer server = new MongoServer(backend);
        server.bind(new InetSocketAddress("127.0.0.1", backend.port), 1, 64); // a stream that waits holds its thread
        System.out.println("ready");
    }

    private ReplicaSet(int port, List<String> options) {
        this.port = port;
        this.options = options;
        this.entriesMax = options.stream().filter(word -> word.startsWith("entries=")).findFirst()
            .map(word -> Integer.parseInt(word.substring(8))).orElse(Integer.MAX_VALUE);
    }

    @Override
    public synchronized Document handleCommand(Channel channel, String database, String command, Document query) {
        switch (command.toLowerCase()) {
            case "saslstart":
                throw new MongoServerError(18, "AuthenticationFailed", "Authentication failed.");
            case "ismaster":
            case "hello":
                return hello(super.handleCommand(channel, database, "ismaster", query));
            case "buildinfo":
                return super.handleCommand(channel, database, command, query)
                    .append("version", "6.0.0").append("versionArray", List.of(6, 0, 0, 0));
            case "aggregate":
                if (changeStream(query) != null) {
                    return open(database, query);
                }
                break;
            case "getmore":
                Stream stream = streams.get(((Number) query.get(command)).longValue());
                if (stream != null) {
                    return more(stream, ((Number) query.getOrDefault("maxTimeMS", 1000)).longValue(), "nextBatch");
                }
                break;
            default:
        }
        return super.handleCommand(channel, database, command, query);
    }

    private Document hello(Document answer) {
        String me = "127.0.0.1:" + port;
        answer.append("maxWireVersion", 17).append("logicalSessionTimeoutMinutes", 30);
        if (!options.contains("standalone")) {
            answer.append("setName", "rs0").append("hosts", List.of(me)).append("me", me).append("primary", me);
        }
        return answer;
    }

    @SuppressWarnings("unchecked")
    private static Document changeStream(Document query) {
        List<Document> pipeline = (List<Document>) query.get("pipeline");
        return pipeline.isEmpty() ? null : (Document) pipeline.get(0).get("$changeStream");
    }

    @SuppressWarnings("unchecked")
    private Document open(String database, Document query) {
        if (options.contains("standalone")) {
            throw new MongoServerError(40573, "The $changeStream stage is only supported on replica sets");
        }
        Stream stream = new Stream();
        stream.id = ++cursors;
        stream.database = database;
        stream.collection = query.get("aggregate") instanceof String ? (String) query.get("aggregate") : null;
        List<Document> pipeline = (List<Document>) query.get("pipeline");
        stream.stages = pipeline.subList(1, pipeline.size());
        Document wanted = changeStream(query);
        stream.looksUp = "updateLookup".equals(wanted.get("fullDocument"));
        stream.wantsBefore = wanted.containsKey("fullDocumentBeforeChange");
        Document token = (Document) wanted.getOrDefault("startAfter", wanted.get("resumeAfter"));
        stream.position = token == null ? newest : Long.parseLong(((String) token.get("_data")).substring(2, 18), 16);
        if (stream.position < forgotten || stream.position > newest) {
            throw new MongoServerError(286, "ChangeStreamHistoryLost",
                "Resume of change stream was not possible, as the resume point may no longer be in the oplog.");
        }
        streams.put(stream.id, stream);
        return more(stream, 0, "firstBatch");
    }

    private Document more(Stream stream, long wait, String name) {
        long deadline = System.currentTimeMillis() + wait;
        List<Document> batch = stream.take();
        for (long left = wait; batch.isEmpty() && left > 0; left = deadline - System.currentTimeMillis()) {
            try {
                wait(left);
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
            batch = stream.take();
        }
        Document cursor = new Document("id", stream.id).append("ns", stream.database + ".$cmd.aggregate").append(name, batch)
            .append("postBatchResumeToken", token(stream.position));
        return new Document("cursor", cursor).append("operationTime", new BsonTimestamp(newest)).append("ok", 1.0);
    }

    private static Document token(long position) {
        return new Document("_data", String.format("82%016X", position));
    }

    @Override
    protected Oplog createOplog() {
        return new Oplog() {
            @Override
            public void handleInsert(String namespace, List<Document> inserted) {
                inserted.forEach(document -> changed(namespace, document.get("_id")));
            }

            @Override
            public void handleUpdate(String namespace, Document selector, Document query, List<Object> ids) {
                ids.forEach(id -> changed(namespace, id));
            }

            @Override
            public void handleDelete(String namespace, Document query, List<Object> ids) {
                ids.forEach(id -> changed(namespace, id));
            }

            @Override
            public void handleDropCollection(String namespace) {
                documents.remove(namespace);
                append(namespace, "drop", new Document());
            }

            @Override
            public Cursor createCursor(Document changeStream, String namespace, Aggregation aggregation) {
                throw new IllegalStateException();
            }
        };
    }

    /** Tells how a document is different from what was last told of it: a write that failed changed nothing. */
    private void changed(String namespace, Object id) {
        Map<Object, Document> known = documents.computeIfAbsent(namespace, name -> new HashMap<>());
        Document before = known.get(id);
        Document after = current(namespace, id);
        if (after == null ? before == null : after.equals(before)) {
            return;
        }
        Document entry = new Document("documentKey", new Document("_id", id)).append("before", before).append("after", after);
        if (after == null) {
            known.remove(id);
        } else {
            known.put(id, after);
        }
        append(namespace, before == null ? "insert" : after == null ? "delete" : "update", entry);
    }

    private Document current(String namespace, Object id) {
        int dot = namespace.indexOf('.');
        MongoCollection<?> collection =
            resolveDatabase(namespace.substring(0, dot)).resolveCollection(namespace.substring(dot + 1), false);
        return collection == null ? null
            : collection.handleQueryAsStream(new Document("_id", id)).findFirst().map(Document::cloneDeeply).orElse(null);
    }

    private void append(String namespace, String type, Document entry) {
        newest = Math.max(newest + 1, Instant.now().getEpochSecond() << 32);
        entries.add(entry.append("at", newest).append("ns", namespace).append("type", type).append("wall", Instant.now()));
        while (entries.size() > entriesMax) {
            forgotten = (long) entries.remove(0).get("at");
        }
        notifyAll();
    }

    private class Stream {
        long id;
        String database;
        String collection;
        List<Document> stages;
        boolean looksUp;
        boolean wantsBefore;
        long position;

        List<Document> take() {
            int low = 0;
            for (int high = entries.size(); low < high; ) {
                int middle = (low + high) >>> 1;
                if ((long) entries.get(middle).get("at") <= position) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            List<Document> some = entries.subList(low, Math.min(entries.size(), low + 500));
            List<Document> events = some.stream()
                .filter(entry -> ((String) entry.get("ns")).startsWith(database + "."))
                .map(this::event).collect(Collectors.toList());
            if (!some.isEmpty()) {
                position = (long) some.get(some.size() - 1).get("at");
            }
            return Aggregation.fromPipeline(stages, ReplicaSet.this::resolveDatabase, resolveDatabase(database), null, null)
                .runStagesAsStream(events.stream()).collect(Collectors.toList());
        }

        private Document event(Document entry) {
            String namespace = (String) entry.get("ns");
            String type = (String) entry.get("type");
            long at = (long) entry.get("at");
            Document event = new Document("_id", token(at)).append("operationType", type)
                .append("clusterTime", new BsonTimestamp(at)).append("wallTime", entry.get("wall"))
                .append("ns", new Document("db", database).append("coll", namespace.substring(database.length() + 1)));
            if (type.equals("drop")) {
                return event;
            }
            event.append("documentKey", entry.get("documentKey"));
            Object id = ((Document) entry.get("documentKey")).get("_id");
            if (type.equals("insert")) {
                event.append("fullDocument", entry.get("after"));
            } else if (type.equals("update") && looksUp) {
                event.append("fullDocument", current(namespace, id));
            }
            if (wantsBefore && !type.equals("insert")) {
                event.append("fullDocumentBeforeChange", options.contains("preimages") ? entry.get("before") : null);
            }
            return event;
        }
    }
}
