"""The demonstration: people click, an application on Spark counts them live, processes are killed, and the numbers are right."""
