"""Our own operators: functions from DataFrames to a DataFrame, with state."""
