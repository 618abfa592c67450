import java.lang.reflect.Constructor;
import java.lang.reflect.Method;
import java.util.Map;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.execution.FilterExec;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.datasources.v2.MicroBatchScanExec;
import org.apache.spark.sql.execution.datasources.v2.StreamingDataSourceV2ScanRelation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonCustomMetric$;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingPartitionReaderFactory;
import org.apache.spark.sql.execution.datasources.v2.python.UserDefinedPythonDataSource;
import org.apache.spark.sql.execution.python.ArrowPythonRunner;
import org.apache.spark.sql.execution.python.MapInBatchEvaluatorFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import scala.Option;
import scala.collection.Iterator;
import scala.collection.Iterator$;
import scala.collection.immutable.Nil$;
import scala.collection.immutable.Seq;

/** Plans streams of our data source so that Spark takes what Python has read in columns; `columnar.py` says why. */
public class HeadwaterColumns extends SparkStrategy {
    public static final String SOURCE = "headwater";

    /** Spark's own strategy takes projections and filters together with what is below them, so they are planned here as well. */
    public Seq apply(LogicalPlan plan) {
        if (!isOurs(plan)) {
            return Nil$.MODULE$;
        } else if (plan instanceof Project) {
            return only(new ProjectExec(((Project) plan).projectList(), planLater(((Project) plan).child())));
        } else if (plan instanceof Filter) {
            return only(new FilterExec(((Filter) plan).condition(), planLater(((Filter) plan).child())));
        }
        StreamingDataSourceV2ScanRelation of = (StreamingDataSourceV2ScanRelation) plan;
        Seq output = (Seq) of.output();
        MicroBatchStream stream = (MicroBatchStream) of.stream();
        Offset start = (Offset) of.startOffset().get();
        Offset end = (Offset) of.endOffset().get();
        return only(new ProjectExec(output, new HeadwaterScan(output, of.scan(), stream, start, end, Option.empty(), Option.empty())));
    }

    private static boolean isOurs(LogicalPlan plan) {
        if (plan instanceof Project) {
            return isOurs(((Project) plan).child());
        } else if (plan instanceof Filter) {
            return isOurs(((Filter) plan).child());
        } else if (!(plan instanceof StreamingDataSourceV2ScanRelation)) {
            return false;
        }
        StreamingDataSourceV2ScanRelation of = (StreamingDataSourceV2ScanRelation) plan;
        return of.relation().table().name().equals(SOURCE) && of.startOffset().isDefined() && of.endOffset().isDefined();
    }

    private static Seq only(SparkPlan planned) {
        return (Seq) Nil$.MODULE$.$colon$colon(planned);
    }

    /** Makes these classes known where tasks look for theirs, too. */
    public Object definedIn(ClassLoader loader, Map codes) throws Exception {
        HeadwaterReader.runners();
        Class[] takes = new Class[] {String.class, byte[].class, Integer.TYPE, Integer.TYPE};
        Method define = ClassLoader.class.getDeclaredMethod("defineClass", takes);
        define.setAccessible(true);
        java.util.Iterator entries = codes.entrySet().iterator();
        while (entries.hasNext()) {
            Map.Entry entry = (Map.Entry) entries.next();
            byte[] code = (byte[]) entry.getValue();
            define.invoke(loader, new Object[] {entry.getKey(), code, Integer.valueOf(0), Integer.valueOf(code.length)});
        }
        return loader.loadClass(HeadwaterColumns.class.getName()).getConstructor(new Class[0]).newInstance(new Object[0]);
    }
}

public class HeadwaterScan extends MicroBatchScanExec {
    private transient PartitionReaderFactory factory;

    public HeadwaterScan(Seq output, Scan scan, MicroBatchStream stream, Offset start, Offset end, Option keys, Option order) {
        super(output, scan, stream, start, end, keys, order);
    }

    /** Rows that were fetched with the plan are rows already. */
    public boolean supportsColumnar() {
        Iterator partitions = inputPartitions().iterator();
        while (partitions.hasNext()) {
            if (((PythonStreamingInputPartition) partitions.next()).blockId().isDefined()) {
                return false;
            }
        }
        return true;
    }

    public PartitionReaderFactory readerFactory() {
        if (factory == null) {
            factory = new HeadwaterReaders((PythonStreamingPartitionReaderFactory) super.readerFactory());
        }
        return factory;
    }
}

public class HeadwaterReaders implements PartitionReaderFactory {
    private final PythonStreamingPartitionReaderFactory rows;

    public HeadwaterReaders(PythonStreamingPartitionReaderFactory rows) {
        this.rows = rows;
    }

    public boolean supportColumnarReads(InputPartition partition) {
        return ((PythonStreamingInputPartition) partition).blockId().isEmpty();
    }

    public PartitionReader createReader(InputPartition partition) {
        return rows.createReader(partition);
    }

    public PartitionReader createColumnarReader(InputPartition partition) {
        try {
            return new HeadwaterReader(rows, (PythonStreamingInputPartition) partition);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }
}

/** What Spark's own reader does, up to where it takes batches apart into rows. */
public class HeadwaterReader implements PartitionReader {
    private static final String OWN = PythonStreamingPartitionReaderFactory.class.getName().replace('.', '$') + "$$";

    private final Iterator batches;
    private final int width;

    public HeadwaterReader(PythonStreamingPartitionReaderFactory rows, PythonStreamingInputPartition partition)
            throws ReflectiveOperationException {
        StructType schema = (StructType) of(rows, "outputSchema");
        width = schema.length();
        UserDefinedPythonDataSource source = (UserDefinedPythonDataSource) of(rows, "source");
        MapInBatchEvaluatorFactory evaluators = source.createMapInBatchEvaluatorFactory(
                (byte[]) of(rows, "pickledReadFunc"), "read_from_data_source", UserDefinedPythonDataSource.readInputSchema(), schema,
                PythonCustomMetric$.MODULE$.pythonMetrics(), (Option) of(rows, "jobArtifactUUID"), (Option) of(rows, "sessionUUID"));
        Object[] takes = new Object[] {evaluators.createEvaluator(), new int[][] {{0}}};
        ArrowPythonRunner runner = (ArrowPythonRunner) runners().newInstance(takes);
        InternalRow given = new GenericInternalRow(new Object[] {partition.pickedPartition()});
        Object wrapped = new GenericInternalRow(new Object[] {given});
        TaskContext task = TaskContext.get();
        batches = runner.compute(Iterator$.MODULE$.single(Iterator$.MODULE$.single(wrapped)), task.partitionId(), task);
    }

    public boolean next() {
        return batches.hasNext();
    }

    /** The columns of a batch, which come as those of one struct. */
    public Object get() {
        ColumnarBatch batch = (ColumnarBatch) batches.next();
        ArrowColumnVector row = (ArrowColumnVector) batch.column(0);
        ColumnVector[] columns = new ColumnVector[width];
        for (int i = 0; i < width; i++) {
            columns[i] = row.getChild(i);
        }
        return new HeadwaterBatch(columns, batch.numRows());
    }

    public void close() {}

    /** None: asking for them costs more than they tell. */
    public CustomTaskMetric[] currentMetricsValues() {
        return new CustomTaskMetric[0];
    }

    /** How Spark's own reader makes its connection to a worker; fails where Spark has changed. */
    static Constructor runners() throws ReflectiveOperationException {
        String[] fields = new String[] {"outputSchema", "source", "pickledReadFunc", "jobArtifactUUID", "sessionUUID"};
        for (int i = 0; i < fields.length; i++) {
            PythonStreamingPartitionReaderFactory.class.getField(OWN + fields[i]);
        }
        Class evaluator = Class.forName(MapInBatchEvaluatorFactory.class.getName() + "$MapInBatchEvaluator");
        return Class.forName(evaluator.getName() + "$$anon$1").getConstructor(new Class[] {evaluator, int[][].class});
    }

    private static Object of(PythonStreamingPartitionReaderFactory rows, String name) throws ReflectiveOperationException {
        return PythonStreamingPartitionReaderFactory.class.getField(OWN + name).get(rows);
    }
}

/** Whose columns are filled again with what comes next: nobody but the connection closes them. */
public class HeadwaterBatch extends ColumnarBatch {
    public HeadwaterBatch(ColumnVector[] columns, int rows) {
        super(columns, rows);
    }

    public void closeIfFreeable() {}
}
