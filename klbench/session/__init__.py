"""The runner and what it keeps: event log, columns, traces, reports; clients that read them."""
