import com.espertech.esper.common.client.EPCompiled;
import com.espertech.esper.common.client.EventBean;
import com.espertech.esper.common.client.configuration.Configuration;
import com.espertech.esper.compiler.client.CompilerArguments;
import com.espertech.esper.compiler.client.EPCompilerProvider;
import com.espertech.esper.runtime.client.EPEventService;
import com.espertech.esper.runtime.client.EPRuntime;
import com.espertech.esper.runtime.client.EPRuntimeProvider;
import com.espertech.esper.runtime.client.EPStatement;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;

/**
 * Esper over bids that lie in memory as objects, sent to it one by one from one thread.
 *
 * Requests: {@code bids <file>} reads the bids, four little-endian longs each: auction, bidder, price, time in ms.
 * {@code run <file of statements, one a line> <bids>} answers {@code <nanoseconds> <matches>} for so many of the first bids; the
 * statements are compiled and deployed before the clock starts.
 */
public final class EsperSide {
    public static final class Bid {
        private final long auction;
        private final long bidder;
        private final long price;
        private final long time;

        Bid(long auction, long bidder, long price, long time) {
            this.auction = auction;
            this.bidder = bidder;
            this.price = price;
            this.time = time;
        }

        public long getAuction() {
            return auction;
        }

        public long getBidder() {
            return bidder;
        }

        public long getPrice() {
            return price;
        }

        public long getTime() {
            return time;
        }
    }

    private static final int BYTES = 4 * Long.BYTES;

    private final Configuration configuration = new Configuration();
    private Bid[] bids = {};
    private long matches;
    private int runs;

    private EsperSide() {
        configuration.getCommon().addEventType("Bid", Bid.class);
        configuration.getRuntime().getThreading().setInternalTimerEnabled(false);
    }

    private String read(Path file) throws Exception {
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
            bids = new Bid[(int) (channel.size() / BYTES)];
            ByteBuffer rows = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
            rows.order(ByteOrder.LITTLE_ENDIAN);
            for (int row = 0; row < bids.length; row++) {
                bids[row] = new Bid(rows.getLong(), rows.getLong(), rows.getLong(), rows.getLong());
            }
        }
        return Integer.toString(bids.length);
    }

    private String run(Path statements, int count) throws Exception {
        EPRuntime runtime = EPRuntimeProvider.getRuntime("run-" + runs++, configuration);
        matches = 0;
        try {
            for (String text : Files.readAllLines(statements)) {
                deploy(runtime, text);
            }
            System.gc();
            EPEventService service = runtime.getEventService();
            long began = System.nanoTime();
            for (int row = 0; row < count; row++) {
                service.sendEventBean(bids[row], "Bid");
            }
            return (System.nanoTime() - began) + "\t" + matches;
        } finally {
            runtime.destroy();
        }
    }

    private void deploy(EPRuntime runtime, String text) throws Exception {
        EPCompiled compiled = EPCompilerProvider.getCompiler().compile(text, new CompilerArguments(configuration));
        for (EPStatement statement : runtime.getDeploymentService().deploy(compiled).getStatements()) {
            statement.addListener((EventBean[] found, EventBean[] gone, EPStatement from, EPRuntime in) -> {
                matches += found.length;
            });
        }
    }

    private String answer(List<String> words) throws Exception {
        return switch (words.get(0)) {
            case "bids" -> read(Path.of(words.get(1)));
            case "run" -> run(Path.of(words.get(1)), Integer.parseInt(words.get(2)));
            default -> throw new IllegalArgumentException(words.get(0));
        };
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        EsperSide side = new EsperSide();
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
