import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.standard.StandardAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.LongPoint;
import org.apache.lucene.document.StringField;
import org.apache.lucene.document.TextField;
import org.apache.lucene.index.Term;
import org.apache.lucene.monitor.CustomQueryHandler;
import org.apache.lucene.monitor.MatchingQueries;
import org.apache.lucene.monitor.Monitor;
import org.apache.lucene.monitor.MonitorQuery;
import org.apache.lucene.monitor.MultiMatchingQueries;
import org.apache.lucene.monitor.MultipassTermFilteredPresearcher;
import org.apache.lucene.monitor.Presearcher;
import org.apache.lucene.monitor.QueryMatch;
import org.apache.lucene.monitor.RegexpQueryHandler;
import org.apache.lucene.monitor.TermWeightor;
import org.apache.lucene.search.BooleanClause.Occur;
import org.apache.lucene.search.BooleanQuery;
import org.apache.lucene.search.PhraseQuery;
import org.apache.lucene.search.Query;
import org.apache.lucene.search.RegexpQuery;
import org.apache.lucene.search.TermQuery;

/**
 * Lucene Monitor with its best presearcher: several passes, terms weighed by how many documents have them.
 *
 * Requests: {@code documents <file>} reads documents, {@code searches <file> <count>} registers so many of the searches in a file, and
 * both answer how many there are. {@code run <first> <documents> <batch>} matches documents, as many at a time, and answers
 * {@code <CPU nanoseconds of the process> <nanoseconds> <matches>}; their analysis is part of it.
 */
public final class LuceneSide {
    private static final String BODY = "body";
    private static final int PASSES = 4;
    private static final int SAMPLE = 2_000;
    private static final int REGISTERED_AT_ONCE = 10_000;
    private static final double FREQUENCY_N = 1;
    private static final double FREQUENCY_K = 0.1;

    private final Analyzer analyzer = new StandardAnalyzer();
    private final List<String[]> documents = new ArrayList<>();
    private Monitor monitor;

    private String readDocuments(Path file) throws Exception {
        documents.clear();
        for (String line : Files.readAllLines(file)) {
            documents.add(line.split("\t", -1));
        }
        return Integer.toString(documents.size());
    }

    private String register(Path file, int count) throws Exception {
        if (monitor != null) {
            monitor.close();
        }
        monitor = new Monitor(analyzer, presearcher());
        List<MonitorQuery> waiting = new ArrayList<>();
        try (BufferedReader lines = Files.newBufferedReader(file)) {
            for (int number = 0; number < count; number++) {
                waiting.add(new MonitorQuery(Integer.toString(number), query(lines.readLine().split("\t", -1))));
                if (waiting.size() == REGISTERED_AT_ONCE) {
                    monitor.register(waiting);
                    waiting.clear();
                }
            }
        }
        monitor.register(waiting);
        return Integer.toString(monitor.getQueryCount());
    }

    private Presearcher presearcher() {
        Map<String, Integer> frequencies = new HashMap<>();
        for (String[] document : documents.subList(0, Math.min(SAMPLE, documents.size()))) {
            for (String word : new HashSet<>(List.of(document[document.length - 1].split(" ")))) {
                frequencies.merge(word, 1, Integer::sum);
            }
        }
        TermWeightor weightor = TermWeightor.termFreqWeightor(frequencies, FREQUENCY_N, FREQUENCY_K);
        List<CustomQueryHandler> handlers = List.of(new RegexpQueryHandler());
        return new MultipassTermFilteredPresearcher(PASSES, 0.0f, weightor, handlers, Collections.emptySet());
    }

    private static Query query(String[] parts) {
        switch (parts[0]) {
            case "A":
                return all(parts[1].split(" "), new BooleanQuery.Builder()).build();
            case "P":
                return new PhraseQuery(BODY, parts[1].split(" "));
            case "B":
                return choice(parts);
            case "R": {
                BooleanQuery.Builder builder = all(new String[] {parts[1]}, new BooleanQuery.Builder());
                builder.add(LongPoint.newRangeQuery(parts[2], Long.parseLong(parts[3]), Long.parseLong(parts[4])), Occur.MUST);
                if (!parts[5].isEmpty()) {
                    builder.add(new TermQuery(new Term("category", parts[5])), Occur.MUST);
                }
                return builder.build();
            }
            case "X": {
                // The presearcher knows nothing of a PrefixQuery: it would be held against every document.
                Query prefix = new RegexpQuery(new Term(BODY, parts[1] + ".*"));
                if (parts[2].isEmpty()) {
                    return prefix;
                }
                return all(new String[] {parts[2]}, new BooleanQuery.Builder()).add(prefix, Occur.MUST).build();
            }
            default:
                throw new IllegalArgumentException(parts[0]);
        }
    }

    private static Query choice(String[] parts) {
        BooleanQuery.Builder either = new BooleanQuery.Builder();
        for (String word : parts[2].split(" ")) {
            either.add(new TermQuery(new Term(BODY, word)), Occur.SHOULD);
        }
        BooleanQuery.Builder builder = new BooleanQuery.Builder().add(either.build(), Occur.MUST);
        if (!parts[1].isEmpty()) {
            all(parts[1].split(" "), builder);
        }
        if (!parts[3].isEmpty()) {
            for (String word : parts[3].split(" ")) {
                builder.add(new TermQuery(new Term(BODY, word)), Occur.MUST_NOT);
            }
        }
        return builder.build();
    }

    private static BooleanQuery.Builder all(String[] words, BooleanQuery.Builder builder) {
        for (String word : words) {
            builder.add(new TermQuery(new Term(BODY, word)), Occur.MUST);
        }
        return builder;
    }

    private String run(int first, int count, int batch) throws Exception {
        System.gc();
        long cpu = cpuNanoseconds();
        long began = System.nanoTime();
        long matches = 0;
        for (int start = first; start < first + count; start += batch) {
            int end = Math.min(start + batch, first + count);
            matches += batch == 1 ? matchOne(start) : matchMany(start, end);
        }
        return (cpuNanoseconds() - cpu) + "\t" + (System.nanoTime() - began) + "\t" + matches;
    }

    private int matchOne(int number) throws Exception {
        MatchingQueries<QueryMatch> found = monitor.match(document(documents.get(number)), QueryMatch.SIMPLE_MATCHER);
        refuse(found.getErrors());
        return found.getMatchCount();
    }

    private int matchMany(int start, int end) throws Exception {
        Document[] many = new Document[end - start];
        for (int number = start; number < end; number++) {
            many[number - start] = document(documents.get(number));
        }
        MultiMatchingQueries<QueryMatch> found = monitor.match(many, QueryMatch.SIMPLE_MATCHER);
        refuse(found.getErrors());
        int matches = 0;
        for (int number = 0; number < many.length; number++) {
            matches += found.getMatchCount(number);
        }
        return matches;
    }

    private static void refuse(Map<String, Exception> errors) throws Exception {
        for (Map.Entry<String, Exception> error : errors.entrySet()) {
            throw new IllegalStateException("search " + error.getKey(), error.getValue());
        }
    }

    private static Document document(String[] parts) {
        Document document = new Document();
        document.add(new LongPoint("price", Long.parseLong(parts[0])));
        document.add(new LongPoint("rooms", Long.parseLong(parts[1])));
        document.add(new LongPoint("area", Long.parseLong(parts[2])));
        document.add(new StringField("category", parts[3], Field.Store.NO));
        document.add(new TextField(BODY, parts[4], Field.Store.NO));
        return document;
    }

    private static long cpuNanoseconds() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    private String answer(List<String> words) throws Exception {
        return switch (words.get(0)) {
            case "documents" -> readDocuments(Path.of(words.get(1)));
            case "searches" -> register(Path.of(words.get(1)), Integer.parseInt(words.get(2)));
            case "run" -> run(
                Integer.parseInt(words.get(1)), Integer.parseInt(words.get(2)), Integer.parseInt(words.get(3)));
            default -> throw new IllegalArgumentException(words.get(0));
        };
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        LuceneSide side = new LuceneSide();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String answer;
            try {
                answer = side.answer(List.of(line.split("\t")));
            } catch (Exception error) {
                error.printStackTrace();
                answer = "error\t" + String.valueOf(error.getMessage()).replaceAll("\\s+", " ");
            }
            answers.println(answer);
            answers.flush();
        }
        System.exit(0); // threads of the library would keep the process alive
    }
}
