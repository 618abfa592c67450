import java.util.HashSet;
import java.util.Set;
import org.apache.spark.sql.streaming.StreamingQueryListener;

/** Notes which queries have done something; `listener.py` says why. */
public class HeadwaterListener extends StreamingQueryListener {
    private final Set queries = new HashSet();

    public void onQueryStarted(StreamingQueryListener.QueryStartedEvent event) {
        note(event.id());
    }

    public void onQueryProgress(StreamingQueryListener.QueryProgressEvent event) {
        note(event.progress().id());
    }

    public void onQueryIdle(StreamingQueryListener.QueryIdleEvent event) {
        note(event.id());
    }

    public void onQueryTerminated(StreamingQueryListener.QueryTerminatedEvent event) {
        note(event.id());
    }

    private synchronized void note(Object query) {
        queries.add(query.toString());
    }

    /** The ids of queries that have done something since the last call. */
    public synchronized String take() {
        String found = String.join(" ", queries);
        queries.clear();
        return found;
    }
}
