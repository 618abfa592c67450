"""The contract suites: what every store of logs and of views must do."""
