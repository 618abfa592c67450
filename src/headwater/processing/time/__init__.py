"""Event time: watermarks, late rows, clocks of devices."""
