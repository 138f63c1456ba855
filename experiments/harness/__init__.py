"""What every experiment runs in: settings, command line, record, loggers, tables, plots, workloads."""
