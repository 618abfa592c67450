"""The files that Spark writes on this machine, without a process for each of them.

Hadoop, by which Spark writes its checkpoints, gives a new file its permissions by starting `chmod`, unless there is a native library
that PySpark does not bring. A micro-batch writes four files (its offsets, its commit, and a checksum of each): `chmod` took a third
of the time of a batch that does little. Java can do the same by itself. So Hadoop's local files are put into other hands in the
Java process that we start: a class of a few lines, compiled by Janino, which Spark has for the code that it generates. Where some part
of that is missing everything stays as it was, and is slower.
"""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

_NAME = "HeadwaterFiles"
_SOURCE = """
import java.io.IOException;
import java.lang.reflect.Method;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class HeadwaterFiles extends RawLocalFileSystem {
    public void setPermission(Path path, FsPermission permission) throws IOException {
        if (permission.getStickyBit()) {
            super.setPermission(path, permission);
        } else {
            Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(permission.toString()));
        }
    }

    public void takeOver(Configuration settings) throws Exception {
        URI files = URI.create("file:///");
        LocalFileSystem system = new LocalFileSystem(this);
        system.initialize(files, settings);
        Class[] takes = new Class[] {URI.class, Configuration.class, FileSystem.class};
        Method add = FileSystem.class.getDeclaredMethod("addFileSystemForTesting", takes);
        add.setAccessible(true);
        add.invoke(null, new Object[] {files, settings, system});
    }
}
"""
_say = logging.getLogger("headwater.processing")


def write_without_processes(spark: SparkSession) -> None:
    """Lets Java itself set the permissions of files that Spark writes from now on."""
    jvm = spark._jvm
    assert jvm is not None
    settings = spark._jsc.hadoopConfiguration()
    try:
        if file_system(spark) == _NAME:
            return
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(_SOURCE)
        compiler.getClassLoader().loadClass(_NAME).newInstance().takeOver(settings)
    except Exception as error:  # noqa: BLE001 - the bridge to Java has errors of its own, and all of them mean no
        _say.debug("Spark starts a process for each file that it writes: %s", error)


def file_system(spark: SparkSession) -> str:
    """The class by which Spark reads and writes local files."""
    jvm = spark._jvm
    assert jvm is not None
    files = jvm.org.apache.hadoop.fs.FileSystem.getLocal(spark._jsc.hadoopConfiguration())
    return str(files.getRaw().getClass().getName())
